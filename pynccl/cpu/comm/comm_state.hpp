// The life of a communicator: creation, use, end; and the state of its background operation.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "base/nccl.hpp"

namespace pncpu {

enum class Phase { Creating, Ready, Finalizing, Finalized, Suspended };

class CommState {
 public:
  std::atomic<Phase> phase{Phase::Creating};
  std::atomic<bool> revoked{false};

  // Destroy and Abort: one of several callers ends the communicator. Under the issue lock.
  enum class End { None, Destroy, Abort };
  End ending() const { return ending_.load(std::memory_order_acquire); }
  bool begin_end(End how) {
    End none = End::None;
    return ending_.compare_exchange_strong(none, how);
  }
  void take_back_end();
  void ended();
  bool await_end();  // false: the end was taken back

  // A creation in an open group has not begun and can be cancelled. Only one of the two calls succeeds.
  bool begin_creation() { return exchange_creation(Creation::Begun) != Creation::Cancelled; }
  bool is_being_created() const {
    return creation_.load() == Creation::Begun && phase.load() == Phase::Creating &&
           pending() == ncclInProgress;
  }
  bool cancel_creation() { return exchange_creation(Creation::Cancelled) == Creation::Announced; }

  // The state of the background operation: ncclInProgress, then its result. A wrong call on a non-blocking
  // communicator sets it for good.
  ncclResult_t pending() const { return pending_.load(std::memory_order_acquire); }
  void set_pending(ncclResult_t state);
  // A background operation, which the ticket identifies. Its end changes the state only if no newer operation
  // has begun: the operation's own last step may have made the communicator ready before.
  uint64_t begin_background();
  void end_background(uint64_t ticket, ncclResult_t result);
  ncclResult_t await_pending();

  // A call on a non-blocking communicator was issued. As in NCCL it is accepted later: the first poll returns
  // ncclInProgress, a later one ncclSuccess.
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
  bool ended_ = false;       // under mutex_
  uint64_t background_ = 0;  // under mutex_: the newest ticket
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace pncpu
