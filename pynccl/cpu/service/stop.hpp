// Interrupts a wait of another thread.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

namespace pncpu {

// Belongs to one creation.
class Stop {
 public:
  void set() {
    std::lock_guard<std::mutex> lock(mutex_);
    flag_.store(true);
    if (wake_) wake_();
  }
  bool is_set() const { return flag_.load(); }
  const std::atomic<bool>* flag() const { return &flag_; }

  // While this object exists, set() calls `wake`; immediately if it was set before. Only the innermost object
  // counts.
  class During {
   public:
    During(Stop& stop, std::function<void()> wake) : stop_(stop) {
      std::lock_guard<std::mutex> lock(stop_.mutex_);
      if (stop_.is_set()) wake();
      outer_ = std::move(stop_.wake_);
      stop_.wake_ = std::move(wake);
    }
    ~During() {
      std::lock_guard<std::mutex> lock(stop_.mutex_);
      stop_.wake_ = std::move(outer_);
    }
    During(const During&) = delete;
    During& operator=(const During&) = delete;

   private:
    Stop& stop_;
    std::function<void()> outer_;
  };

 private:
  std::mutex mutex_;
  std::atomic<bool> flag_{false};
  std::function<void()> wake_;
};

}  // namespace pncpu
