// The buffers, windows and reduction operators that callers registered with a communicator.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "comm/open_windows.hpp"
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

template <>
struct HandleTraits<Registration> {
  static constexpr HandleKind kind = HandleKind::Registration;
  static constexpr char name[] = "handle", maker[] = "ncclCommRegister";
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
  // `first` and `last` tell whether the memory was not registered before, and is not any more.
  void* add_buffer(const Registered& memory, bool* first);
  bool remove_buffer(void* handle, bool* last);  // false for a handle that is not of this communicator

  uint64_t next_window() { return ++windows_begun_; }  // numbers windows in the order of the calls
  void* add_window(std::shared_ptr<Window> window);
  // All ranks have the window: from now on collectives may use its mappings.
  void share_window(std::shared_ptr<const Window> window);
  std::shared_ptr<const OpenWindows> shared_windows() const;       // nullptr: none
  std::shared_ptr<Window> window_numbered(uint64_t number) const;  // nullptr if it is not open
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
  std::atomic<uint64_t> windows_begun_{0};
  std::map<void*, std::shared_ptr<Window>> windows_;  // by handle
  std::shared_ptr<const OpenWindows> shared_;
  std::map<int, RedOp> ops_;
  int next_op_ = ncclNumOps;
};

}  // namespace pncpu
