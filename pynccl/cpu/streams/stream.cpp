#include "streams/stream.hpp"

#include <linux/futex.h>
#include <sched.h>

#include <algorithm>
#include <map>

#include "comm/comm.hpp"

namespace pncpu {
namespace {

// Left to a caller that will wait itself: longer, the more often it did.
constexpr int64_t kLeastGraceNs = 100 * 1000, kMostGraceNs = 2000 * 1000;
constexpr int64_t kSliceNs = 100 * 1000 * 1000;
constexpr int kIdleTicks = 20;
constexpr double kFirstLook = 0.15;  // seconds without a move before a deadlock is looked for

int64_t until(Deadline deadline, int64_t most) {
  if (deadline == kForever) return most;
  int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
  return std::max<int64_t>(0, std::min(ns, most));
}

// Whether other programs want the cores. Then looking for news costs a waiter its time slice, milliseconds
// each time, and sleeping does not: whoever is woken is run soon. A look that took long was interrupted;
// after a while, ever longer, looking is tried again.
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
Crowd g_crowd;

// Serialises issuing, so that every rank's streams and communicators see the groups of a process in one
// order.
std::mutex g_issue;

}  // namespace

Launch::~Launch() = default;

void Launch::wait_for_news(const std::vector<uint32_t>& seen, int64_t ns) {
  if (batches.size() == 1) return batches[0].comm->bell().wait(seen[0], ns);
#if defined(SYS_futex_waitv) && defined(FUTEX_32)
  std::vector<futex_waitv> words;
  for (size_t i = 0; i < batches.size() && i < 128; ++i) {
    Doorbell& bell = batches[i].comm->bell();
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    words.push_back({seen[i], reinterpret_cast<uintptr_t>(&bell.rings), FUTEX_32, 0});
  }
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t end = now.tv_nsec + ns;
  timespec ts{now.tv_sec + time_t(end / 1000000000), long(end % 1000000000)};
  long r = syscall(SYS_futex_waitv, words.data(), words.size(), 0, &ts, CLOCK_MONOTONIC);
  bool unknown = r < 0 && errno == ENOSYS;
  for (size_t i = 0; i < words.size(); ++i) batches[i].comm->bell().sleepers.fetch_sub(1);
  if (!unknown) return;
#endif
  batches[0].comm->bell().wait(seen[0], std::min<int64_t>(ns, 200 * 1000));
}

// Time-outs and deadlocks are looked for now and then, ever more rarely, only while nothing moves.
void Launch::when_blocked(Clock::time_point since, double* next_look) {
  double blocked = std::chrono::duration<double>(Clock::now() - since).count();
  bool look = blocked > *next_look;
  for (Batch& b : batches) {
    if (b.done || !b.comm->turn_of(b)) continue;
    if (b.comm->timeout_s > 0 && blocked > b.comm->timeout_s)
      b.comm->fail_with(ncclTimeout, b.comm->waiting_for(b) + " for more than " +
                                         std::to_string(b.comm->timeout_s) + " s (PYNCCL_CPU_TIMEOUT)");
    else if (look)
      b.comm->look_for_deadlock(b);
  }
  if (look) *next_look += std::min(*next_look, 2.0);
}

// Spins, then spins politely: a peer may be waiting for this very core.
bool Launch::spin_for_news(const std::vector<uint32_t>& seen) {
  Patience least = batches[0].comm->patience();
  for (Batch& b : batches) least = least.with(b.comm->patience());
  Deadline start = Clock::now(), spin = start + std::chrono::nanoseconds(least.spin_ns),
           yield = start + std::chrono::nanoseconds(least.yield_ns), before = start;
  if (least.interrupted_ns && g_crowd.here(start)) return false;
  for (int i = 1;; ++i) {
    for (size_t k = 0; k < batches.size(); ++k)
      if (batches[k].comm->bell().look() != seen[k]) return true;
    cpu_pause();
    if (i % 32) continue;
    Deadline now = Clock::now();
    if (least.interrupted_ns && now - before > std::chrono::nanoseconds(least.interrupted_ns))
      return g_crowd.noticed(now), false;
    before = now;
    if (now < spin) continue;
    if (now >= yield) return false;
    sched_yield();
  }
}

ncclResult_t Launch::run(Deadline deadline) {
  std::vector<uint32_t> seen(batches.size());
  bool was_blocked = false;
  Clock::time_point since;
  double next_look = kFirstLook;
  for (;;) {
    bool all = true, moved = false;
    for (size_t i = 0; i < batches.size(); ++i) seen[i] = batches[i].comm->bell().look();
    for (Batch& b : batches) {
      if (b.done) continue;
      Step s = b.comm->progress(b);
      if (s == Step::Done || s == Step::Failed) {
        if (s == Step::Failed) b.result = b.comm->error();
        b.comm->finish(b);
        moved = true;
      } else {
        all = false;
        moved = moved || s == Step::Moved;
      }
    }
    if (all) return ncclSuccess;
    if (moved) {
      was_blocked = false;
      continue;
    }
    if (!was_blocked) {
      was_blocked = true;
      since = Clock::now();
      next_look = kFirstLook;
      if (spin_for_news(seen)) continue;
    }
    when_blocked(since, &next_look);
    int64_t ns = until(deadline, kSliceNs);
    if (ns == 0) return ncclInProgress;
    wait_for_news(seen, ns);
  }
}

Stream::Stream() = default;

Stream::~Stream() {
  stop_.store(true);
  arrivals_.ring();
  stopping_.ring();
  if (worker_.joinable()) worker_.join();
}

void Stream::push(Node node) {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    queue_.push_back(std::move(node));
    enqueued_.fetch_add(1);
    if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  }
  arrivals_.ring();
}

ncclResult_t Stream::run(Node& node, Deadline deadline) {
  if (node.kind == Node::Record) {
    uint64_t before = node.event->happened.load();
    while (before < node.number && !node.event->happened.compare_exchange_weak(before, node.number)) {
    }
    node.event->bell.ring();
    return ncclSuccess;
  }
  if (node.kind == Node::Wait) {
    for (;;) {
      uint32_t seen = node.event->bell.look();
      if (node.event->happened.load() >= node.number) return ncclSuccess;
      int64_t ns = until(deadline, kSliceNs);
      if (ns == 0 || stop_.load()) return ncclInProgress;
      node.event->bell.wait(seen, ns);
    }
  }
  Launch& launch = *node.launch;
  if (!node.came) {
    node.came = true;
    if (launch.streams_to_come.fetch_sub(1) == 1) {
      // Last of the streams to come here: it runs the launch, now or when it is next driven.
      node.number = 1;
    }
  }
  if (node.number == 1) {
    ncclResult_t r = launch.run(deadline);
    if (r == ncclInProgress) return r;
    launch.done.store(true);
    launch.batches[0].comm->bell().ring();
    note_errors(launch);
    return r;
  }
  while (!launch.done.load()) {
    int64_t ns = until(deadline, 1000 * 1000);
    if (ns == 0) return ncclInProgress;
    Doorbell& bell = launch.batches[0].comm->bell();
    uint32_t seen = bell.look();
    if (!launch.done.load()) bell.wait(seen, ns);
  }
  note_errors(launch);
  return ncclSuccess;
}

void Stream::note_errors(const Launch& launch) {
  for (const Batch& b : launch.batches) {
    if (b.result == ncclSuccess) continue;
    std::lock_guard<std::mutex> lock(queue_mutex_);
    errors_.emplace(b.comm->serial, b.result);
    failed_.store(true);
  }
}

ncclResult_t Stream::take_error(uint64_t comm_serial) {
  if (!failed_.load()) return ncclSuccess;
  std::lock_guard<std::mutex> lock(queue_mutex_);
  auto it = comm_serial == kAnyone ? errors_.begin() : errors_.find(comm_serial);
  if (it == errors_.end()) return ncclSuccess;
  ncclResult_t r = it->second;
  errors_.erase(it);
  failed_.store(!errors_.empty());
  return r;
}

ncclResult_t Stream::drive(uint64_t target, Deadline deadline) {
  while (completed_.load() < target) {
    uint32_t seen = completions_.look();
    if (!running_.try_lock()) {
      int64_t ns = until(deadline, kSliceNs);
      if (ns == 0) return ncclInProgress;
      completions_.wait(seen, ns);
      continue;
    }
    ncclResult_t r = ncclSuccess;
    while (completed_.load() < target && r != ncclInProgress) {
      Node* node;
      {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        node = &queue_.front();  // a deque keeps it in place while others are added
      }
      r = run(*node, deadline);
      if (r == ncclInProgress) break;
      Node gone;
      {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        gone = std::move(queue_.front());
        queue_.pop_front();
      }
      completed_.fetch_add(1);
      completions_.ring();
    }
    running_.unlock();
    completions_.ring();
    if (r == ncclInProgress) return r;
  }
  return ncclSuccess;
}

ncclResult_t Stream::synchronize(Deadline deadline, uint64_t comm_serial) {
  ncclResult_t r = drive(enqueued_.load(), deadline);
  return r == ncclInProgress ? r : take_error(comm_serial);
}

// Runs what nobody waits for. A caller that synchronizes at once finds the work still there and runs it
// itself, which saves two changes of thread; so this thread leaves it alone for a moment, and nothing wakes
// it in that moment.
void Stream::work() {
  name_this_thread("pynccl-stream");
  int idle_ticks = 0;
  int64_t grace_ns = kLeastGraceNs;
  for (;;) {
    uint32_t arrivals = arrivals_.look(), stopping = stopping_.look();
    if (stop_.load()) return;  // after the looks: a ring in between is not missed
    uint64_t done = completed_.load(), all = enqueued_.load();
    if (done == all) {
      if (++idle_ticks < kIdleTicks)
        stopping_.wait(stopping, grace_ns);
      else
        arrivals_.wait(arrivals, kSliceNs * 600);
      continue;
    }
    idle_ticks = 0;
    stopping_.wait(stopping, grace_ns);
    if (completed_.load() != done || stop_.load()) {
      grace_ns = std::min(2 * grace_ns, kMostGraceNs);
      continue;
    }
    grace_ns = kLeastGraceNs;
    if (drive(all, after_ms(0)) == ncclInProgress) drive(all, after_ms(1000));
  }
}

std::shared_ptr<Stream> default_stream(int device, int copy) {
  static auto* streams = new std::map<std::tuple<std::thread::id, int, int>, std::weak_ptr<Stream>>;
  static auto* mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  auto& slot = (*streams)[{std::this_thread::get_id(), device, copy}];
  std::shared_ptr<Stream> stream = slot.lock();
  if (!stream) slot = stream = std::make_shared<Stream>();
  return stream;
}

namespace {

Batch& batch_of(Launch& launch, Comm* comm) {
  for (Batch& b : launch.batches)
    if (b.comm.get() == comm) return b;
  launch.batches.emplace_back();
  launch.batches.back().comm = comm->shared_from_this();
  return launch.batches.back();
}

ncclResult_t wait_all(const std::vector<Stream*>& streams) {
  ncclResult_t result = ncclSuccess;
  for (Stream* s : streams) {
    ncclResult_t r = s->synchronize(kForever, Stream::kAnyone);
    if (result == ncclSuccess) result = r;
  }
  return result;
}

// Calls that share a communicator or a stream, directly or through others, run together.
struct Cluster {
  std::vector<Comm*> comms;
  std::vector<Stream*> streams;
  std::vector<const Op*> ops;
  bool touches(const Op& op) const {
    return std::count(comms.begin(), comms.end(), op.comm) ||
           std::count(streams.begin(), streams.end(), op.stream);
  }
  void add(const Op& op) {
    if (!std::count(comms.begin(), comms.end(), op.comm)) comms.push_back(op.comm);
    if (!std::count(streams.begin(), streams.end(), op.stream)) streams.push_back(op.stream);
    ops.push_back(&op);
  }
};

std::vector<Cluster> cluster(const std::vector<Op>& ops) {
  std::vector<Cluster> clusters;
  for (const Op& op : ops) {
    Cluster merged;
    for (auto it = clusters.begin(); it != clusters.end();) {
      if (!it->touches(op)) {
        ++it;
        continue;
      }
      for (const Op* o : it->ops) merged.add(*o);
      it = clusters.erase(it);
    }
    merged.add(op);
    clusters.push_back(std::move(merged));
  }
  for (Cluster& c : clusters) std::sort(c.ops.begin(), c.ops.end());  // back into the order of the calls
  return clusters;
}

void push_launch(const std::shared_ptr<Launch>& launch, const std::vector<Stream*>& streams) {
  launch->streams_to_come.store(int(streams.size()));
  for (Batch& b : launch->batches) b.ticket = b.comm->take_ticket();
  for (Stream* s : streams) {
    Node node;
    node.launch = launch;
    s->push(std::move(node));
  }
}

}  // namespace

ncclResult_t issue_one(const Op& op) {
  auto launch = std::make_shared<Launch>();
  launch->batches.resize(1);
  Batch& batch = launch->batches[0];
  batch.comm = op.comm->shared_from_this();
  (is_p2p(op.func) ? batch.p2p : batch.colls).push_back(op);
  {
    std::lock_guard<std::mutex> lock(g_issue);
    op.comm->count_issue(op);
    push_launch(launch, {op.stream});
  }
  return op.comm->blocking_calls ? op.stream->synchronize(kForever, op.comm->serial) : ncclSuccess;
}

ncclResult_t issue(std::vector<Op> ops) {
  std::vector<Stream*> used;
  bool wait = false;
  {
    std::lock_guard<std::mutex> lock(g_issue);
    for (Cluster& c : cluster(ops)) {
      auto launch = std::make_shared<Launch>();
      launch->batches.reserve(c.comms.size());
      for (const Op* op : c.ops) {
        Batch& batch = batch_of(*launch, op->comm);
        (is_p2p(op->func) ? batch.p2p : batch.colls).push_back(*op);
        op->comm->count_issue(*op);
        wait = wait || op->comm->blocking_calls;
      }
      push_launch(launch, c.streams);
      used.insert(used.end(), c.streams.begin(), c.streams.end());
    }
  }
  return wait ? wait_all(used) : ncclSuccess;
}

}  // namespace pncpu
