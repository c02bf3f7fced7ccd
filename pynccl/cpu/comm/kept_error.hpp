// An error that a communicator keeps with its text: mostly the first of its kind.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>

#include "base/log.hpp"

namespace pncpu {

class KeptError {
 public:
  ErrorCode code() const { return code_.load(std::memory_order_acquire); }
  bool failed() const { return code().failed(); }
  std::string text() const;
  LateRanks late() const;
  // True for the first error. Its text is set before its code is visible.
  bool decide(ErrorCode code, std::string_view text, const LateRanks& late = {}) noexcept;
  // Takes the place of what was decided; ncclSuccess forgets it.
  void renew(ErrorCode code, std::string_view text, const LateRanks& late = {}) noexcept;

 private:
  void set(ErrorCode code, std::string_view text, const LateRanks& late) noexcept;  // under mutex_
  std::atomic<ErrorCode> code_{ErrorCode()};
  mutable std::mutex mutex_;
  std::string text_;
  LateRanks late_;
  bool cut_ = false;  // no memory for the text
};

}  // namespace pncpu
