// Calls functions when their time has come, for what no thread waits for. One thread of the process looks at
// the clock.
#pragma once

#include <Python.h>

#include <map>
#include <system_error>

#include "comm.hpp"

namespace pynccl {

class Alarm {
 public:
  using Call = std::function<void()>;
  using Key = std::pair<Clock::time_point, uint64_t>;

  // The call is made without locks, in a thread of its own.
  static Key set(Clock::time_point when, Call call) {
    static std::atomic<uint64_t> last{0};
    const Key key{when, ++last};
    here().add(key, std::move(call));
    return key;
  }
  // Unless the call has begun it is not made.
  static void unset(const Key& key) { here().take(key); }

 private:
  using Calls = std::map<Key, Call>;

  // Never destroyed, since its thread does not end. A forked process has another.
  static Alarm& here() {
    static std::atomic<Alarm*> made{nullptr};
    Alarm* found = made.load();
    if (found && !found->home_.foreign()) return *found;
    auto fresh = std::make_unique<Alarm>();
    return made.compare_exchange_strong(found, fresh.get()) ? *fresh.release() : *found;
  }

  void add(const Key& key, Call call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!watched_) std::thread([this] { watch(); }).detach();
    watched_ = true;
    calls_.emplace(key, std::move(call));
    if (key.first < wakes_) changed_.notify_one();
  }

  // The caller destroys it without the lock: that may need the GIL.
  Calls::node_type take(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_.extract(key);
  }

  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto now = Clock::now();
      wakes_ = now + kLongest;
      if (!calls_.empty()) wakes_ = std::min(wakes_, calls_.begin()->first.first);
      if (wakes_ <= now) {
        try {
          std::thread([this] { ring(); }).detach();
        } catch (const std::system_error&) {  // no more threads; tries again
        }
        // A call may take any time, and wait for the next one: that gets another thread.
        wakes_ = now + kSlice;
      }
      changed_.wait_until(lock, wakes_);
    }
  }

  void ring() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!calls_.empty() && calls_.begin()->first.first <= Clock::now()) {
      auto due = calls_.extract(calls_.begin());
      lock.unlock();
      due.mapped()();
      due = {};
      lock.lock();
    }
  }

  Home home_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Calls calls_;
  bool watched_ = false;
  // The time of the next look. Most deadlines are later, and need not wake the thread.
  Clock::time_point wakes_ = Clock::time_point::min();
};

}  // namespace pynccl
