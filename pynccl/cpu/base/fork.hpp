// What a fork means for this library, in one place: a child owns nothing of its parent's. Everything that a
// process has of its own (handle tables, the service, default streams) is a part that the child makes anew;
// the parent's parts are left behind as they were, with their locks, and never touched again.
#pragma once

#include <atomic>
#include <cstdint>

namespace pncpu {

// How many forks lie between the first process that used this library and this one.
uint32_t process_epoch();

// While one lives, no fork begins: for descriptors, which a forked child closes, since an open copy would
// hide the parent's death from its peers. Nothing that waits may be called meanwhile.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
  int keep(int fd);    // one that was just made, or -1; returns it
  void close(int fd);  // one that is kept; not in a child, which has closed its parent's
};

// Called in a forked child, in which no other thread runs; `hook` lives for ever.
struct ForkHook {
  void (*run)();
  ForkHook* next = nullptr;
};
void at_fork(ForkHook* hook);

namespace detail {
struct Part {
  std::atomic<void*> object{nullptr};
  Part* next = nullptr;
  bool listed = false;
};
void list_part(Part* part);
}  // namespace detail

// This process's T, made at its first use and never destroyed. A forked child gets one of its own.
template <class T>
T& per_process() {
  static detail::Part part;  // constant-initialised: without a guard that a fork could leave locked
  void* object = part.object.load(std::memory_order_acquire);
  if (!object) {
    detail::list_part(&part);
    T* fresh = new T;
    if (part.object.compare_exchange_strong(object, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *static_cast<T*>(object);
}

}  // namespace pncpu
