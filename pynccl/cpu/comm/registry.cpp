#include "comm/registry.hpp"

namespace pncpu {

Registry::~Registry() {
  for (void* handle : registrations_) handles<Registration>().take(handle);
  for (void* handle : windows_) handles<Window>().take(handle);
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
