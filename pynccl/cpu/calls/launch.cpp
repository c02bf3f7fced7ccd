#include "calls/launch.hpp"

#include <linux/futex.h>

namespace pncpu {

namespace {
// Seconds without progress before the first deadlock search, with at most so many ranks. More ranks wait
// longer, since their calls take longer.
constexpr double kFirstLook = 0.15;
constexpr int kPrompt = 128;
constexpr int kLooksForData = 8;  // a look at the sockets is a system call

Step progress(Batch& batch) {
  try {
    return batch.comm->progress(batch);
  } catch (const std::bad_alloc&) {
    return batch.comm->fail_with(ncclSystemError, "out of memory while it ran an operation");
  }
}
}  // namespace

// A step of each batch; true when all are done.
bool Launch::step(bool* moved) {
  bool all = true;
  for (Batch& b : batches) {
    if (b.done) continue;
    Step s = progress(b);
    if (s == Step::Done || s == Step::Failed) {
      if (s == Step::Failed) b.result = b.comm->error();
      b.comm->finish(b);
      *moved = true;
    } else {
      all = false;
      *moved = *moved || s == Step::Moved;
    }
  }
  return all;
}

ncclResult_t Launch::run(Deadline deadline) {
  for (;;) {
    bool moved = false;
    for (Batch& b : batches) b.seen = b.comm->bell().look();
    bool all = step(&moved);
    if (moved && searched_) {
      searched_ = false;
      per_process<Deadlocks>().moved(this);
    }
    if (all) break;
    if (moved) {
      blocked_ = false;
      continue;
    }
    if (!blocked_) {
      blocked_ = true;
      blocked_since_ = Clock::now();
      next_look_ = kFirstLook * std::max(1.0, double(batches[0].comm->nranks) / kPrompt);
      if (spin_for_news()) continue;
    }
    try {
      when_blocked();
    } catch (const std::bad_alloc&) {  // the next search is later
    }
    int64_t ns = until(deadline, kSliceNs);
    if (ns == 0) return ncclInProgress;
    wait_for_news(ns);
  }
  done_.store(true);
  ended_.ring();
  return ncclSuccess;
}

ncclResult_t Launch::wait(Deadline deadline) {
  for (;;) {
    uint32_t seen = ended_.look();
    if (done_.load()) return ncclSuccess;
    int64_t ns = until(deadline, kSliceNs);
    if (ns == 0) return ncclInProgress;
    ended_.wait(seen, ns);
  }
}

Task::Errors Launch::errors() const {
  Errors found;
  for (const Batch& b : batches)
    if (b.result != ncclSuccess) found.emplace_back(b.comm->serial, b.result);
  return found;
}

// Spins for a limited time only: a peer may be waiting for this core.
bool Launch::spin_for_news() {
  WaitPolicy least = batches[0].comm->wait_policy();
  for (Batch& b : batches) least = least.with(b.comm->wait_policy());
  return look_for(least, [&, i = 0]() mutable {
    bool on_sockets = ++i % kLooksForData == 0;
    for (const Batch& b : batches)
      if (b.comm->bell().look() != b.seen || (on_sockets && b.comm->data_came())) return true;
    return false;
  });
}

void Launch::wait_for_news(int64_t ns) {
  for (const Batch& b : batches)
    if (b.comm->data_came()) return;
  const Batch& first = batches[0];
  if (batches.size() == 1 && first.comm->turns.is_turn_of(first.ticket))
    return first.comm->sleep(first.seen, ns);
  for (const Batch& b : batches) b.comm->session.wake_on_data();
  if (batches.size() == 1) return first.comm->bell().wait(first.seen, ns);
#if defined(SYS_futex_waitv) && defined(FUTEX_32)
  futex_waitv words[FUTEX_WAITV_MAX];
  size_t count = std::min<size_t>(batches.size(), FUTEX_WAITV_MAX);
  for (size_t i = 0; i < count; ++i) {
    Doorbell& bell = batches[i].comm->bell();
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    words[i] = {batches[i].seen, reinterpret_cast<uintptr_t>(&bell.rings), FUTEX_32, 0};
  }
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t end = now.tv_nsec + ns;
  timespec ts{now.tv_sec + time_t(end / 1000000000), long(end % 1000000000)};
  long r = syscall(SYS_futex_waitv, words, count, 0, &ts, CLOCK_MONOTONIC);
  bool unknown = r < 0 && errno == ENOSYS;
  for (size_t i = 0; i < count; ++i) batches[i].comm->bell().sleepers.fetch_sub(1);
  if (!unknown) return;
#endif
  first.comm->bell().wait(first.seen, std::min<int64_t>(ns, 200 * 1000));
}

// Checks for time-outs and deadlocks at growing intervals while there is no progress.
void Launch::when_blocked() {
  double blocked = std::chrono::duration<double>(Clock::now() - blocked_since_).count();
  for (Batch& b : batches)
    if (!b.done && b.comm->turns.is_turn_of(b.ticket) && b.comm->timeout_s > 0 && blocked > b.comm->timeout_s)
      b.comm->fail_with(ncclTimeout, b.comm->waiting_for(b) + " for more than " +
                                         std::to_string(b.comm->timeout_s) + " s (PYNCCL_CPU_TIMEOUT)");
  if (blocked <= next_look_) return;
  next_look_ += std::min(next_look_, 2.0);
  std::vector<Wait> waits;
  for (Batch& b : batches)
    if (!b.done) waits.push_back(b.comm->waits_of(b));
  searched_ = true;
  per_process<Deadlocks>().blocked(this, std::move(waits), blocked);
}

}  // namespace pncpu
