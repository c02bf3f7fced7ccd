// Events: positions in the work of a stream.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>

#include "base/core.hpp"

namespace pncpu {

class Stream;

// One record of an event. Recording the event again creates another one; waits for this one are unaffected.
struct Recording {
  std::atomic<bool> happened{false};
  Doorbell bell;
  std::weak_ptr<Stream> stream;       // the recorded stream
  uint64_t number = 0;                // the number of its nodes up to the record
  uint64_t comm_serial = 0;           // whose errors count; 0: those of any communicator
  ncclResult_t result = ncclSuccess;  // of the work on the stream before the record
  std::atomic<int> notified{-1};      // a descriptor of its own, to write to when it happens
  ~Recording() { notify(-1); }
  // `failed`, the serial of the communicator whose work has failed, replaces comm_serial.
  void happen(ncclResult_t r, uint64_t failed) {
    result = r;
    comm_serial = failed;
    happened.store(true);
    bell.ring();
    notify(-1);
  }
  // Exchanges the descriptor. Writes to the old one if the event has happened, and closes it.
  void notify(int descriptor) {
    const int old = notified.exchange(descriptor);
    const uint64_t one = 1;
    if (old >= 0 && has_happened() && write(old, &one, sizeof one) < 0) {
      // It is full: its reader has enough to read.
    }
    if (old >= 0) close(old);
  }
  bool has_happened() const { return happened.load(); }
  ncclResult_t state() const { return has_happened() ? result : ncclInProgress; }
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
