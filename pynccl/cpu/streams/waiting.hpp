// How a wait polls: it spins first, then yields between polls, then sleeps.
#pragma once

#include <sched.h>

#include <algorithm>

#include "base/core.hpp"

namespace pncpu {

constexpr int64_t kLongYieldNs = 1000 * 1000;

struct WaitPolicy {
  int64_t spin_ns = 0, yield_ns = 0;
  int64_t interrupted_ns = 0;  // a poll that took longer lost the core to other threads; 0: not checked
  // The policy of a wait for one of two events.
  WaitPolicy with(const WaitPolicy& o) const {
    return {std::min(spin_ns, o.spin_ns), std::min(yield_ns, o.yield_ns),
            std::min(interrupted_ns, o.interrupted_ns)};
  }
};

// Whether other programs compete for the cores. Then a polling thread loses its time slice, milliseconds each
// time, while a sleeping thread is scheduled soon after it is woken. A poll that took long was interrupted.
// Polling is tried again after a pause, which grows.
class Contention {
 public:
  bool here(Clock::time_point now) const { return ns(now) < until_.load(std::memory_order_relaxed); }
  void noticed(Clock::time_point now) {
    int64_t at = ns(now), pause = pause_.load(std::memory_order_relaxed);
    // Programs wait now and then only: other programs that competed a moment ago still do.
    bool again = at < until_.load(std::memory_order_relaxed) + kLongest;
    pause = again ? std::min(2 * pause, kLongest) : kShortest;
    pause_.store(pause, std::memory_order_relaxed);
    until_.store(at + pause, std::memory_order_relaxed);
  }

 private:
  static int64_t ns(Clock::time_point t) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
  }
  static constexpr int64_t kShortest = 10 * 1000 * 1000, kLongest = 1000 * 1000 * 1000;
  std::atomic<int64_t> until_{0}, pause_{kShortest};
};
extern Contention g_contention;

constexpr int64_t kSliceNs = 100 * 1000 * 1000;  // the longest sleep of a wait between two checks

// Nanoseconds to the deadline, at most `most`.
inline int64_t until(Deadline deadline, int64_t most) {
  if (deadline == kForever) return most;
  int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
  return std::max<int64_t>(0, std::min(ns, most));
}

// Polls until `changed` returns true (true) or the policy's time is over (false).
template <class Changed>
bool look_for(const WaitPolicy& policy, Changed changed) {
  Deadline start = Clock::now(), spin = start + std::chrono::nanoseconds(policy.spin_ns),
           yield = start + std::chrono::nanoseconds(policy.yield_ns), before = start;
  if (policy.interrupted_ns && g_contention.here(start)) return false;
  for (int i = 1;; ++i) {
    if (changed()) return true;
    cpu_pause();
    if (i % 32) continue;
    Deadline now = Clock::now();
    if (policy.interrupted_ns && now - before > std::chrono::nanoseconds(policy.interrupted_ns))
      return g_contention.noticed(now), false;
    before = now;
    if (now < spin) continue;
    if (now >= yield) {
      // The peer works on this operation, and has a core of its own unless other programs use it.
      if (policy.interrupted_ns && policy.yield_ns >= kLongYieldNs) g_contention.noticed(now);
      return false;
    }
    sched_yield();
  }
}

}  // namespace pncpu
