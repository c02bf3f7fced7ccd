// How a wait passes its time: it looks alone on its core first, then lets others have the core, then sleeps.
#pragma once

#include <sched.h>

#include <algorithm>

#include "base/core.hpp"

namespace pncpu {

struct Patience {
  int64_t spin_ns = 0, yield_ns = 0;
  int64_t interrupted_ns = 0;  // a single look that took longer lost the core to others; 0: not asked
  // That of a wait for either of two things.
  Patience with(const Patience& o) const {
    return {std::min(spin_ns, o.spin_ns), std::min(yield_ns, o.yield_ns),
            std::min(interrupted_ns, o.interrupted_ns)};
  }
};

// Whether other programs want the cores. Then looking costs a waiter its time slice, milliseconds each time,
// and sleeping does not: whoever is woken is run soon. A look that took long was interrupted; after a while,
// ever longer, looking is tried again.
class Crowd {
 public:
  bool here(Clock::time_point now) const { return ns(now) < until_.load(std::memory_order_relaxed); }
  void noticed(Clock::time_point now) {
    int64_t at = ns(now), pause = pause_.load(std::memory_order_relaxed);
    bool again = at < until_.load(std::memory_order_relaxed) + pause;
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
extern Crowd g_crowd;

constexpr int64_t kSliceNs = 100 * 1000 * 1000;  // the longest sleep before a wait looks around again

// Nanoseconds to the deadline, at most `most`.
inline int64_t until(Deadline deadline, int64_t most) {
  if (deadline == kForever) return most;
  int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
  return std::max<int64_t>(0, std::min(ns, most));
}

// Looks until `changed` says so (true) or patience has run out (false).
template <class Changed>
bool look_for(const Patience& patience, Changed changed) {
  Deadline start = Clock::now(), spin = start + std::chrono::nanoseconds(patience.spin_ns),
           yield = start + std::chrono::nanoseconds(patience.yield_ns), before = start;
  if (patience.interrupted_ns && g_crowd.here(start)) return false;
  for (int i = 1;; ++i) {
    if (changed()) return true;
    cpu_pause();
    if (i % 32) continue;
    Deadline now = Clock::now();
    if (patience.interrupted_ns && now - before > std::chrono::nanoseconds(patience.interrupted_ns))
      return g_crowd.noticed(now), false;
    before = now;
    if (now < spin) continue;
    if (now >= yield) return false;
    sched_yield();
  }
}

}  // namespace pncpu
