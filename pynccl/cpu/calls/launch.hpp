// The calls of one group on streams that it ties together.
#pragma once

#include <vector>

#include "comm/comm.hpp"
#include "streams/stream.hpp"

namespace pncpu {

// Runs when all of its streams have reached it; the thread that drives the last of them runs it.
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
  // Only for the thread that runs the launch; another thread may continue after a time-out.
  bool blocked_ = false, searched_ = false;  // no progress since; registered for the deadlock search
  Clock::time_point blocked_since_;
  double next_look_ = 0;
  Doorbell ended_;
};

}  // namespace pncpu
