#include "comm/fate.hpp"

namespace pncpu {

std::string Fate::text() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cut_ ? "out of memory" : text_;
}

bool Fate::decide(ErrorCode code, std::string_view text) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) return false;
  try {
    text_ = text;
  } catch (const std::bad_alloc&) {
    cut_ = true;
  }
  code_.store(code, std::memory_order_release);
  return true;
}

}  // namespace pncpu
