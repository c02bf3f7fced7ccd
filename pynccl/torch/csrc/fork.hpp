// Objects of a parent process in a forked child: their threads do not exist, their locks may be held forever,
// and their communicators belong to the parent.
#pragma once

#include <pthread.h>

#include <atomic>

namespace pynccl {

// The number of forks between the process that loaded this module and this one.
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
