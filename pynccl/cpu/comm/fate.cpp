#include "comm/fate.hpp"

namespace pncpu {

std::string Fate::text() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cut_ ? "out of memory" : text_;
}

bool Fate::decide(ErrorCode code, std::string_view text) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) return false;
  set(code, text);
  return true;
}

void Fate::renew(ErrorCode code, std::string_view text) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  set(code, text);
}

void Fate::set(ErrorCode code, std::string_view text) noexcept {
  try {
    text_ = text;
    cut_ = false;
  } catch (const std::bad_alloc&) {
    cut_ = true;
  }
  code_.store(code, std::memory_order_release);
}

}  // namespace pncpu
