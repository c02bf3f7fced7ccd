#include "comm/kept_error.hpp"

namespace pncpu {

std::string KeptError::text() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cut_ ? "out of memory" : text_;
}

LateRanks KeptError::late() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return late_;
}

bool KeptError::decide(ErrorCode code, std::string_view text, const LateRanks& late) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) return false;
  set(code, text, late);
  return true;
}

void KeptError::renew(ErrorCode code, std::string_view text, const LateRanks& late) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  set(code, text, late);
}

void KeptError::set(ErrorCode code, std::string_view text, const LateRanks& late) noexcept {
  late_ = late;
  try {
    text_ = text;
    cut_ = false;
  } catch (const std::bad_alloc&) {
    cut_ = true;
  }
  code_.store(code, std::memory_order_release);
}

}  // namespace pncpu
