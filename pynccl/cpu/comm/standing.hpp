// Where a communicator stands: being created, in use, ending; what its caller may do with it now.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "base/nccl.hpp"

namespace pncpu {

enum class Phase { Creating, Ready, Finalizing, Finalized, Suspended };

class Standing {
 public:
  std::atomic<Phase> phase{Phase::Creating};
  std::atomic<bool> revoked{false};

  // Destroy and Abort: of several callers one ends the communicator. Under the issue lock.
  enum class End { None, Destroy, Abort };
  End ending() const { return ending_.load(std::memory_order_acquire); }
  bool begin_end(End how) {
    End none = End::None;
    return ending_.compare_exchange_strong(none, how);
  }
  void take_back_end();
  void ended();
  bool await_end();  // false where it was taken back

  // A creation that has not begun, in a group that is still open, can be cancelled; of the two one succeeds.
  bool begin_creation() { return exchange_creation(Creation::Begun) != Creation::Cancelled; }
  bool cancel_creation() { return exchange_creation(Creation::Cancelled) == Creation::Announced; }

  // What runs in the background: ncclInProgress, then its result. That of a non-blocking communicator is also
  // what a wrong call answered, for good.
  ncclResult_t pending() const { return pending_.load(std::memory_order_acquire); }
  void set_pending(ncclResult_t state);
  ncclResult_t await_pending();

  // A call of a non-blocking communicator was issued. As in NCCL it is taken some time later: the first poll
  // answers ncclInProgress for certain, and one after it ncclSuccess.
  void answer_later() { answers_.store(kAnswers); }
  bool must_poll() const { return answers_.load(std::memory_order_acquire) > 0 && pending() == ncclSuccess; }
  ncclResult_t poll();

 private:
  enum class Creation { Announced, Begun, Cancelled };
  Creation exchange_creation(Creation to) {
    Creation from = Creation::Announced;
    creation_.compare_exchange_strong(from, to);
    return from;
  }
  static constexpr int kAnswers = 2;
  std::atomic<Creation> creation_{Creation::Announced};
  std::atomic<End> ending_{End::None};
  std::atomic<ncclResult_t> pending_{ncclInProgress};
  std::atomic<int> answers_{0};
  bool ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pncpu
