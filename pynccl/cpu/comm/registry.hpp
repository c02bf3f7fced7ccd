// What callers registered with a communicator: buffers, windows, reduction operators.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/handles.hpp"
#include "reduce/reduce.hpp"

namespace pncpu {

struct Registered {
  uint64_t comm;  // its serial
  void* buffer;
  size_t size;
  int flags;
};
struct Registration : Registered {};
struct Window : Registered {};

template <>
struct HandleTraits<Registration> {
  static constexpr HandleKind kind = HandleKind::Registration;
  static constexpr char name[] = "handle", maker[] = "ncclCommRegister";
};
template <>
struct HandleTraits<Window> {
  static constexpr HandleKind kind = HandleKind::Window;
  static constexpr char name[] = "win", maker[] = "ncclCommWindowRegister";
};

struct RedOp {
  ncclDataType_t dtype;
  PreMul scalar;
  const void* device_scalar;
};

class Registry {
 public:
  explicit Registry(uint64_t serial) : serial_(serial) {}
  ~Registry();  // ends the handles that are left

  template <class T>
  void* add(void* buffer, size_t size, int flags) {
    auto made = std::make_shared<T>();
    static_cast<Registered&>(*made) = {serial_, buffer, size, flags};
    std::lock_guard<std::mutex> lock(mutex_);
    void* handle = handles<T>().add(std::move(made));
    return *left_of<T>().insert(handle).first;
  }
  // nullptr after fail(): also for those of another communicator.
  template <class T>
  std::shared_ptr<T> find(const void* handle, const char* function) const {
    std::shared_ptr<T> found = find_handle<T>(handle, function);
    if (!found || found->comm == serial_) return found;
    fail(ncclInvalidArgument, "%s: %s %p belongs to another communicator", function, HandleTraits<T>::name,
         handle);
    return nullptr;
  }
  template <class T>
  ncclResult_t remove(void* handle, const char* function) {
    if (!find<T>(handle, function)) return ncclInvalidArgument;
    if (!handles<T>().take(handle)) return refuse_handle<T>(handle, function);
    std::lock_guard<std::mutex> lock(mutex_);
    left_of<T>().erase(handle);
    return ncclSuccess;
  }

  int add_op(const RedOp& op);
  bool remove_op(int op);
  bool find_op(int op, RedOp* found) const;

 private:
  template <class T>
  std::set<void*>& left_of();
  const uint64_t serial_;
  mutable std::mutex mutex_;
  std::set<void*> registrations_, windows_;
  std::map<int, RedOp> ops_;
  int next_op_ = ncclNumOps;
};

template <>
inline std::set<void*>& Registry::left_of<Registration>() {
  return registrations_;
}
template <>
inline std::set<void*>& Registry::left_of<Window>() {
  return windows_;
}

}  // namespace pncpu
