// A barrier that names the ranks that did not come.
#include "backend.hpp"

namespace pynccl {

// Every rank announces itself in the store and rank 0 checks, so that no rank blocks in NCCL if one is
// missing.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  auto limit = options.timeout.count() >= 0 ? std::min(options.timeout, kLongest) : options_->timeout;
  auto deadline = Clock::now() + limit;
  std::string round;
  {
    auto lock = entered();
    check_has_members();
    round = c10::str("pynccl/barrier/", monitored_++, "/");
  }
  auto wait_until = [&](const std::string& key, Clock::time_point until) {
    for (auto pause = std::chrono::microseconds(50); !store_->check({key});
         pause = std::min<std::chrono::microseconds>(pause * 2, Milliseconds(10))) {
      if (Clock::now() >= until) return false;
      check_signals();
      std::this_thread::sleep_for(pause);
    }
    return true;
  };
  const std::vector<uint8_t> word{1};
  if (rank_ != 0) {
    store_->set(c10::str(round, rank_), word);
    std::string text = c10::str("Rank ", rank_,
                                " successfully reached monitoredBarrier, but received errors while waiting "
                                "for send/recv from rank 0. Please check rank 0 logs for faulty rank.");
    // Rank 0 answers just after its own deadline.
    if (!wait_until(round + "done", deadline + std::chrono::seconds(1)))
      C10_THROW_ERROR(DistBackendError, text);
    auto said = store_->get(round + "done");
    if (said.size() > 1)
      C10_THROW_ERROR(DistBackendError, text + " It said: " + std::string(said.begin(), said.end()));
    return;
  }
  std::string late = Clock::now() >= deadline ? "Rank 0 timed out in monitoredBarrier. " : "";
  std::string missing;
  for (int r = 1; r < size_; ++r) {
    if (wait_until(c10::str(round, r), deadline)) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    if (!wait_all_ranks) break;
  }
  if (missing.empty()) {
    store_->set(round + "done", word);
    return;
  }
  std::string text = wait_all_ranks ? "[Rank 0]: Ranks " + missing + " failed to pass monitoredBarrier in "
                                    : "[Rank 0]: Rank " + missing + " failed to pass monitoredBarrier in ";
  text = late + text + std::to_string(limit.count()) + " ms";
  store_->set(round + "done", std::vector<uint8_t>(text.begin(), text.end()));
  C10_THROW_ERROR(DistBackendError, text);
}

}  // namespace pynccl
