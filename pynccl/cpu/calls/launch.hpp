// What one group issued on the streams that it ties together.
#pragma once

#include <vector>

#include "comm/comm.hpp"
#include "streams/stream.hpp"

namespace pncpu {

// Runs when every one of its streams has come to it, by whoever drives the last that came.
class Launch final : public Task {
 public:
  std::vector<Batch> batches;

  void tie(int streams) { to_come_.store(streams); }
  bool come() override { return to_come_.fetch_sub(1) == 1; }
  ncclResult_t run(Deadline deadline) override;
  ncclResult_t wait(Deadline deadline) override;
  Errors errors() const override;

 private:
  bool step(bool* moved);
  bool spin_for_news();
  void wait_for_news(int64_t ns);
  void when_blocked();
  std::atomic<int> to_come_{1};
  std::atomic<bool> done_{false};
  // Of whoever runs it, also when it goes on after a time-out.
  bool blocked_ = false, searched_ = false;  // since its last move; a search of deadlocks knows it
  Clock::time_point blocked_since_;
  double next_look_ = 0;
  Doorbell ended_;
};

}  // namespace pncpu
