#include "comm/registry.hpp"

namespace pncpu {

namespace {

constexpr uintptr_t kPage = 4096;

bool covers(const Registered& outer, const Registered& inner) {
  auto first = [](const Registered& r) { return reinterpret_cast<uintptr_t>(r.buffer) / kPage; };
  auto end = [](const Registered& r) {
    return (reinterpret_cast<uintptr_t>(r.buffer) + r.size + kPage - 1) / kPage;
  };
  return first(outer) <= first(inner) && end(inner) <= end(outer);
}

}  // namespace

Registry::~Registry() {
  for (auto& [handle, buffer] : buffers_) handles<Registration>().take(handle);
  for (auto& [handle, window] : windows_) handles<Window>().take(handle);
}

void* Registry::add_buffer(const Registered& memory, bool* first) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [handle, buffer] : buffers_)
    if (covers(*buffer, memory)) return *first = false, ++buffer->count, handle;
  *first = true;
  auto made = std::make_shared<Registration>();
  static_cast<Registered&>(*made) = memory;
  void* handle = handles<Registration>().add(made);
  buffers_[handle] = std::move(made);
  return handle;
}

bool Registry::remove_buffer(void* handle, bool* last) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = buffers_.find(handle);
  if (it == buffers_.end()) return false;
  *last = --it->second->count == 0;
  if (!*last) return true;
  buffers_.erase(it);
  handles<Registration>().take(handle);
  return true;
}

void* Registry::add_window(std::shared_ptr<Window> window) {
  std::lock_guard<std::mutex> lock(mutex_);
  void* handle = handles<Window>().add(window);
  windows_[handle] = std::move(window);
  return handle;
}

void Registry::share_window(std::shared_ptr<const Window> window) {
  std::lock_guard<std::mutex> lock(mutex_);
  shared_ = (shared_ ? *shared_ : OpenWindows({})).with(std::move(window));
}

std::shared_ptr<const OpenWindows> Registry::shared_windows() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return shared_;
}

std::shared_ptr<Window> Registry::window_numbered(uint64_t number) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [handle, window] : windows_)
    if (window->number == number) return window;
  return nullptr;
}

std::shared_ptr<Window> Registry::find_window(const void* handle, const char* function) const {
  std::shared_ptr<Window> found = find_handle<Window>(handle, function);
  if (!found || found->comm == serial_) return found;
  fail_in(function, ncclInvalidArgument, "win %p belongs to another communicator", handle);
  return nullptr;
}

ncclResult_t Registry::remove_window(void* handle, const char* function) {
  if (!find_window(handle, function)) return ncclInvalidArgument;
  if (!handles<Window>().take(handle)) return refuse_handle<Window>(handle, function);
  std::shared_ptr<const OpenWindows> before;  // unmapped without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = windows_.find(handle);
  if (it == windows_.end()) return ncclSuccess;
  if (shared_) {
    before = std::move(shared_);
    shared_ = before->without(*it->second);
  }
  windows_.erase(it);
  return ncclSuccess;
}

int Registry::add_op(const RedOp& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_[next_op_] = op;
  return next_op_++;
}

bool Registry::remove_op(int op) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_.erase(op) != 0;
}

bool Registry::find_op(int op, RedOp* found) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = ops_.find(op);
  if (it == ops_.end()) return false;
  *found = it->second;
  return true;
}

}  // namespace pncpu
