// All that this library does about fork: a child owns nothing of its parent's. The state of a process (handle
// tables, the service, default streams) consists of parts. A child creates its own parts; it never touches
// the parent's parts and their locks.
#pragma once

#include <atomic>
#include <cstdint>

namespace pncpu {

// The number of forks between the first process that used this library and this one.
uint32_t process_epoch();

// Prevents a fork while it exists. For descriptors: a forked child closes them, since an open copy would hide
// the parent's death from its peers. The holder must not call anything that waits.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
  int keep(int fd);    // registers a new descriptor or -1, and returns it
  void close(int fd);  // no effect in a child, which has closed its parent's descriptors
};

// Registers a function to be called in forked children, before other threads run. `hook` must live forever.
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

// This process's T, created at its first use and never destroyed. A forked child creates its own.
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
