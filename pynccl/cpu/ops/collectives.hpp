// A collective, as a state machine that never blocks: the ranks agree on the call, then each runs its
// schedule.
#pragma once

#include <atomic>

#include "ops/algorithms.hpp"
#include "ops/executor.hpp"

namespace pncpu {

class Coll {
 public:
  explicit Coll(const Context& context)
      : context_(context), matching_(context), executor_(context, matching_) {}
  void start(const Op& op, uint64_t seq);
  Step step();
  // Ranks that have not come to this collective yet.
  std::vector<int> missing() const;
  std::string str() const;
  uint64_t seq() const { return matching_.mine().seq; }
  // The peers are at work on this collective, so what is waited for comes soon. Asked by any thread.
  bool underway() const { return underway_.load(std::memory_order_relaxed); }

 private:
  void plan();

  enum class Phase { Idle, Matching, Moving };
  const Context& context_;
  Matching matching_;
  Executor executor_;
  Op op_;
  Call call_{};  // what the schedule is for
  Schedule schedule_;
  bool planned_ = false;
  Phase phase_ = Phase::Idle;
  std::atomic<bool> underway_{false};
};

}  // namespace pncpu
