// Interrupts waits of other threads.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <mutex>

namespace pncpu {

class Stop {
 public:
  void set() {
    std::lock_guard<std::mutex> lock(mutex_);
    flag_.store(true);
    for (auto& wake : wakes_) wake();
  }
  bool is_set() const { return flag_.load(); }
  const std::atomic<bool>* flag() const { return &flag_; }

  // While this object exists, set() calls `wake`; immediately if it was set before.
  class During {
   public:
    During(Stop& stop, std::function<void()> wake) : stop_(stop) {
      std::lock_guard<std::mutex> lock(stop_.mutex_);
      if (stop_.is_set()) wake();
      wakes_at_ = stop_.wakes_.insert(stop_.wakes_.end(), std::move(wake));
    }
    ~During() {
      std::lock_guard<std::mutex> lock(stop_.mutex_);
      stop_.wakes_.erase(wakes_at_);
    }
    During(const During&) = delete;
    During& operator=(const During&) = delete;

   private:
    Stop& stop_;
    std::list<std::function<void()>>::iterator wakes_at_;
  };

 private:
  std::mutex mutex_;
  std::atomic<bool> flag_{false};
  std::list<std::function<void()>> wakes_;
};

}  // namespace pncpu
