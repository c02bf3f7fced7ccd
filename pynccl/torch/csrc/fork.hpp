// What is made in one process and found again in those that it forks: its threads are not there, its locks
// may be held for ever, and its communicators are the parent's, which goes on with them.
#pragma once

#include <pthread.h>

#include <atomic>

namespace pynccl {

// How many forks lie between the process that loaded this and this one.
inline std::atomic<unsigned> forks{0};
inline const int counting_forks = pthread_atfork(nullptr, nullptr, [] { ++forks; });

class Home {
 public:
  bool foreign() const { return made_ != forks.load(std::memory_order_relaxed); }

 private:
  unsigned made_ = forks.load(std::memory_order_relaxed);
};

// Gives a value up without destroying it.
template <class T>
void forsake(T& value) {
  new T(std::move(value));
}

}  // namespace pynccl
