// Events: positions in the work of a stream.
#pragma once

#include <memory>
#include <mutex>

#include "base/core.hpp"

namespace pncpu {

class Stream;

// One record of an event. Recording the event again creates another one; waits for this one are unaffected.
struct Recording {
  std::atomic<bool> happened{false};
  Doorbell bell;
  std::weak_ptr<Stream> stream;  // the recorded stream
  uint64_t number = 0;           // the number of its nodes before the record
  void happen() {
    happened.store(true, std::memory_order_release);
    bell.ring();
  }
  bool has_happened() const { return happened.load(std::memory_order_acquire); }
};

class Event {
 public:
  // nullptr: never recorded, which counts as complete.
  std::shared_ptr<Recording> newest() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return newest_;
  }
  void record(std::shared_ptr<Recording> recording) {
    std::lock_guard<std::mutex> lock(mutex_);
    newest_ = std::move(recording);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Recording> newest_;
};

}  // namespace pncpu
