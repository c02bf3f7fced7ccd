// The buffers, windows and reduction operators that callers registered with a communicator.
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
struct Registration : Registered {
  int count = 1;  // number of registrations
};
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
  ~Registry();  // ends all handles

  // Memory whose pages are registered gets the same handle, with a count (NCCL's src/register/register.cc).
  void* add_buffer(const Registered& memory);
  bool remove_buffer(void* handle);  // false for a handle that is not of this communicator

  void* add_window(const Registered& memory);
  // Windows of other communicators are refused, too: nullptr, or a result, after fail().
  std::shared_ptr<Window> find_window(const void* handle, const char* function) const;
  ncclResult_t remove_window(void* handle, const char* function);

  int add_op(const RedOp& op);
  bool remove_op(int op);
  bool find_op(int op, RedOp* found) const;

 private:
  const uint64_t serial_;
  mutable std::mutex mutex_;
  std::map<void*, std::shared_ptr<Registration>> buffers_;  // by handle
  std::set<void*> windows_;
  std::map<int, RedOp> ops_;
  int next_op_ = ncclNumOps;
};

}  // namespace pncpu
