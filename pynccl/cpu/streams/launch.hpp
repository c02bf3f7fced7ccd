// What one group issued on the streams that it ties together.
#pragma once

#include <memory>
#include <vector>

#include "ops/ops.hpp"
#include "streams/waiting.hpp"

namespace pncpu {

struct Comm;

// The calls of one group on one communicator; runs when its turn comes.
struct Batch {
  std::shared_ptr<Comm> comm;
  uint64_t ticket = 0;
  std::vector<Op> colls, p2p;
  bool started = false, done = false;
  ncclResult_t result = ncclSuccess;
  size_t at = 0;
};

// Runs when every one of its streams has come to it, by whoever drives the last that came.
class Launch {
 public:
  std::vector<Batch> batches;

  void tie(int streams) { to_come_.store(streams); }
  // A stream has come to it. True for the last one, which runs it.
  bool come() { return to_come_.fetch_sub(1) == 1; }
  // Until done or the deadline (ncclInProgress). What became of it stands in the batches.
  ncclResult_t run(Deadline deadline);
  // For the streams that do not run it.
  ncclResult_t wait(Deadline deadline);

 private:
  bool step(bool* moved);
  bool spin_for_news(const std::vector<uint32_t>& seen);
  void wait_for_news(const std::vector<uint32_t>& seen, int64_t ns);
  void when_blocked(Clock::time_point since, double* next_look);
  std::atomic<int> to_come_{1};
  std::atomic<bool> done_{false};
  Doorbell ended_;
};

}  // namespace pncpu
