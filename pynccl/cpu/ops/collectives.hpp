// A collective is a state machine that never blocks. First the ranks compare their calls, then each rank runs
// its schedule.
#pragma once

#include <atomic>

#include "ops/algorithms.hpp"
#include "ops/executor.hpp"

namespace pncpu {

struct Choice {
  const char* algorithm;
  size_t most;  // up to how many bytes it stays the same
};

class Coll {
 public:
  explicit Coll(const Context& context)
      : context_(context), matching_(context), executor_(context, matching_) {}
  void start(const Op& op, uint64_t seq);
  Step step();
  // The algorithm of a call of so many bytes (Op::bytes()). Any thread may ask once the communicator is
  // ready.
  Choice choice(Func func, size_t bytes) const;
  // Ranks that have not started this collective.
  std::vector<int> missing() const;
  std::string str() const;
  uint64_t seq() const { return seq_; }
  // The peers run this collective, so data arrives soon. Any thread may call this.
  bool underway() const { return underway_.load(std::memory_order_relaxed); }

 private:
  void plan(const Op& op);
  bool is_to_cut() const;
  void cut();
  void start_piece();
  void tell(const Op& op, const Algorithm& chosen) const;
  CallKind kind(Func func, size_t bytes) const;
  void find_mapped();
  void offer_registered();
  bool same_windows(int peer) const;
  char* memory_of(int peer, uint32_t lent, uint64_t address, size_t bytes) const;
  bool lends(int peer, uint32_t lent, uint64_t address, size_t bytes) const;
  Near mapped_here(int peer) const;
  bool reach_each_other(int peer) const;

  enum class Phase { Idle, Matching, Moving };
  const Context& context_;
  Matching matching_;
  Executor executor_;
  Op op_, piece_;                  // the call, and its part that runs now if it is cut
  size_t piece_at_ = 0;            // where that is in the call, in elements
  size_t cut_count_ = 0;           // the elements of the last call that was cut
  Header header_;                  // of the call
  uint64_t seq_ = 0, pieces_ = 0;  // the call's number, and the pieces so far, which boards number, too
  bool is_cut_ = false;
  Call call_{};  // the call of the schedule
  Schedule schedule_;
  std::vector<char> direct_;                              // Call::direct of the running call
  std::shared_ptr<const Mappings> windows_, registered_;  // of the running call
  std::vector<uint32_t> lent_;                            // by rank: Header::lent of the running call
  std::vector<Near> near_;                                // by rank: what it has mapped of the peer's buffers
  bool planned_ = false, large_ = false;
  Phase phase_ = Phase::Idle;
  std::atomic<bool> underway_{false};
};

}  // namespace pncpu
