#include "comm/deadlock.hpp"

#include <unistd.h>

#include <algorithm>

#include "comm/comm.hpp"

namespace pncpu {
namespace {

constexpr double kAssumedSeconds = 10;
constexpr size_t kMostSteps = 64;
// A blocked launch asks at most this many peers in a round, and others in the next round. If each of n ranks
// asked all others, a call that is only slow would cost n * n messages.
constexpr size_t kMostAsked = 16;
constexpr int kPauseMs = 200;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

}  // namespace

// One edge of a probe's path: this rank of a communicator waits for that peer.
struct Stretch {
  uint64_t communicator;
  int32_t rank, peer;
};

// A probe, its path and the text that describes the path. A verdict travels the same path.
struct Deadlocks::Probe {
  struct Fixed {
    Token process;
    uint64_t period, round, number;
    Need::Kind kind;
    uint8_t assumed = 0, messages_only = 1;
    uint16_t queued;  // edges whose call has been issued behind the launch that waits
    uint32_t steps, at;
  } fixed{};
  std::vector<Stretch> way;
  std::string text;

  Origin origin() const { return {fixed.process, fixed.period}; }
  std::string body() const {
    Fixed f = fixed;
    f.steps = uint32_t(way.size());
    return std::string(reinterpret_cast<const char*>(&f), sizeof f) +
           std::string(reinterpret_cast<const char*>(way.data()), way.size() * sizeof(Stretch)) + text;
  }
  std::string said() const {
    if (way.size() > 1) return text + ": each for " + cause();
    return text + " for a call that the same thread " +
           (fixed.queued ? "has queued behind it" : "makes only after it");
  }
  const char* cause() const {
    if (fixed.queued == 0) return "calls that the next has not made";
    if (fixed.queued == way.size()) return "a call that the next has queued behind its own";
    return "a call that the next has not made, or has queued behind its own";
  }
  const char* remedy() const {
    if (fixed.messages_only) return "; sends and receives of one group, or of send_recv, start together";
    return fixed.queued == 0 ? "" : "; calls of one group start together";
  }
  static bool read(const Blob& body, Probe* probe) {
    Fixed& f = probe->fixed;
    if (body.size < sizeof f) return false;
    memcpy(static_cast<void*>(&f), body.data, sizeof f);
    size_t steps = f.steps * sizeof(Stretch), rest = body.size - sizeof f;
    if (f.steps > kMostSteps || rest < steps || rest - steps > kMaxText) return false;
    probe->way.resize(f.steps);
    memcpy(probe->way.data(), body.data + sizeof f, steps);
    probe->text.assign(body.data + sizeof f + steps, rest - steps);
    return true;
  }
};

struct Deadlocks::Message {
  std::shared_ptr<Comm> comm;
  int to;
  Ctl kind;
  std::string body;
};

Deadlocks::Waiter::Waiter(const std::shared_ptr<Stream>& stream) {
  const Caller caller = this_caller();
  if (caller.limited) return;
  thread_ = caller.thread;
  Deadlocks& all = per_process<Deadlocks>();
  std::lock_guard<std::mutex> lock(all.mutex_);
  Waiting& waiting = all.waiting_[thread_];
  if (waiting.stream.lock() != stream || waiting.until < Clock::now()) waiting.since = Clock::now();
  waiting.stream = stream;
  waiting.until = kForever;
}
Deadlocks::Waiter::~Waiter() {
  if (thread_ == 0) return;
  Deadlocks& all = per_process<Deadlocks>();
  std::lock_guard<std::mutex> lock(all.mutex_);
  if (paused_)
    all.waiting_[thread_].until = after_ms(kPauseMs);
  else
    all.waiting_.erase(thread_);
}

void Deadlocks::moved(Blocker blocker) {
  std::lock_guard<std::mutex> lock(mutex_);
  blocked_.erase(blocker);
}

bool Deadlocks::awaits(const Comm& comm, int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [launch, at] : blocked_)
    for (const Wait& wait : at.waits)
      for (const Need& need : wait.needs)
        if (wait.comm.get() == &comm && need.peer == peer) return true;
  return false;
}

std::string Deadlocks::doing(const Comm& comm) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [launch, at] : blocked_)
    for (const Wait& wait : at.waits) {
      if (wait.comm.get() != &comm || wait.doing.empty() || wait.needs.empty()) continue;
      std::set<int> peers;
      for (const Need& need : wait.needs) peers.insert(need.peer);
      std::string text = wait.doing + (peers.size() > 1 ? " for ranks " : " for rank ");
      for (int peer : peers) text += (peer == *peers.begin() ? "" : ", ") + std::to_string(peer);
      return text;
    }
  return "";
}

void Deadlocks::blocked(Blocker launch, std::vector<Wait> waits, double seconds) {
  look(launch, std::move(waits), seconds, false);
}

void Deadlocks::meets(Blocker meeting, Wait wait, double seconds) {
  look(meeting, {std::move(wait)}, seconds, true);
}

void Deadlocks::look(Blocker blocker, std::vector<Wait> waits, double seconds, bool meets) {
  std::vector<Message> messages;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Blocked& b = blocked_[blocker];
    if (b.period == 0) b.period = ++periods_;
    b.seconds = seconds;
    b.meets = meets;
    b.thread = this_caller().limited ? 0 : this_caller().thread;
    b.waits = std::move(waits);
    Probe probe;
    probe.fixed.process = process_;
    probe.fixed.period = b.period;
    probe.fixed.round = ++b.rounds;
    b.seen.clear();
    spread(b, probe, &messages);
  }
  deliver(messages);
}

// Forwards a probe to peers that a blocked launch waits for, once per round.
void Deadlocks::spread(Blocked& at, Probe probe, std::vector<Message>* out) {
  uint64_t& seen = at.seen[probe.origin()];
  if (seen >= probe.fixed.round) return;
  seen = probe.fixed.round;
  for (const Wait& w : at.waits) {
    if (!w.has_turn) {
      for (auto& [task, other] : blocked_)
        for (const Wait& o : other.waits)
          if (o.has_turn && !other.meets && o.comm == w.comm) spread(other, probe, out);
      continue;
    }
    Probe next = probe;
    uint64_t communicator = w.comm->session.hash;
    bool elsewhere = !next.way.empty() && next.way[0].communicator != communicator;
    next.text += (next.text.empty() ? "" : ", ") + w.doing + (elsewhere ? " of another communicator" : "");
    if (next.text.size() > kMaxText || next.way.size() == kMostSteps) continue;
    const size_t all = w.needs.size(), asked = std::min(all, kMostAsked);
    const uint64_t first = probe.fixed.round * kMostAsked + uint64_t(w.comm->rank);
    for (size_t i = 0; i < asked; ++i) {
      const Need& need = w.needs[size_t((first + i) % all)];
      next.way.push_back({communicator, w.comm->rank, need.peer});
      next.fixed.kind = need.kind;
      next.fixed.messages_only =
          probe.fixed.messages_only && (need.kind == Need::Send || need.kind == Need::Receive);
      next.fixed.number = need.number;
      out->push_back({w.comm, need.peer, Ctl::Probe, next.body()});
      next.way.pop_back();
    }
  }
}

void Deadlocks::deliver(const std::vector<Message>& messages) {
  for (const Message& m : messages) m.comm->session.send(m.to, m.kind, m.body.data(), m.body.size());
}

// The launch at the head of a stream, or at the head of the stream for which its head waits.
Deadlocks::Blocker Deadlocks::head_of(std::shared_ptr<Stream> stream) const {
  for (int hops = 0; stream && hops < 64; ++hops) {
    Stream::Head head = stream->head();
    if (head.task) return head.task.get();
    stream = std::move(head.waits_for);
  }
  return nullptr;
}

// The launch or meeting that must end before this rank starts the operation that a peer needs. nullptr: the
// operation has started, or nothing is known.
Deadlocks::Blocker Deadlocks::blocker_of(Comm& comm, int from, Probe* probe) {
  uint64_t started, issued;
  const bool meeting = probe->fixed.kind == Need::Meeting;
  comm.progress_towards(from, probe->fixed.kind, &started, &issued);
  uint64_t needed = probe->fixed.number;
  if (needed <= started) return nullptr;
  probe->fixed.queued = uint16_t(probe->fixed.queued + (needed <= issued));
  const int thread = comm.calling_thread();
  Blocker met = nullptr;
  for (auto& [blocker, b] : blocked_)
    for (const Wait& w : b.waits) {
      const bool here = w.has_turn && w.comm.get() == &comm;
      if (here && !b.meets && !meeting) return blocker;
      const bool calls = thread != 0 && b.thread == thread;
      if (b.meets && b.seconds >= kAssumedSeconds && (here || calls)) met = blocker;
    }
  if (needed <= issued) return head_of(comm.stream_of_all_pending());
  // A meeting does not wait for the launches of its communicator.
  if (!meeting && !comm.turns.idle()) return nullptr;
  probe->fixed.assumed = 1;
  if (met) return met;
  auto it = waiting_.find(thread);
  bool waits = it != waiting_.end() && Clock::now() < it->second.until;
  return waits && seconds_since(it->second.since) >= kAssumedSeconds ? head_of(it->second.stream.lock())
                                                                     : nullptr;
}

void Deadlocks::probed(Comm& comm, int from, const Blob& body) {
  Probe probe;
  if (!Probe::read(body, &probe)) return;
  std::vector<Message> messages;
  bool cycle = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = blocked_.find(blocker_of(comm, from, &probe));
    if (at == blocked_.end()) return;
    if (!(probe.fixed.process == process_ && probe.fixed.period == at->second.period))
      spread(at->second, probe, &messages);
    else
      cycle = !probe.fixed.assumed || at->second.seconds >= kAssumedSeconds;
  }
  deliver(messages);
  if (!cycle) return;
  probe.text = "deadlock: " + probe.said() + probe.remedy();
  probe.fixed.at = 0;
  fail_cycle(std::move(probe), comm);
}

void Deadlocks::cycle_found(Comm& comm, const Blob& body) {
  Probe verdict;
  if (Probe::read(body, &verdict) && verdict.fixed.at < verdict.way.size())
    fail_cycle(std::move(verdict), comm);
}

// Tells the next rank on the path first, since a failed process may exit. Fails the communicator on which
// this rank waits, and the one on which the rank before it waits for this rank: otherwise that call would
// succeed as soon as this rank continues.
void Deadlocks::fail_cycle(Probe verdict, Comm& before) {
  Stretch here = verdict.way[verdict.fixed.at++];
  std::vector<std::shared_ptr<Comm>> failed{before.shared_from_this()};
  std::shared_ptr<Comm> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [task, b] : blocked_)
      for (const Wait& w : b.waits)
        if (w.has_turn && w.comm->session.hash == here.communicator && w.comm->rank == here.rank) {
          link = w.comm;
          for (const Wait& all : b.waits) failed.push_back(all.comm);
        }
  }
  if (!link) return;
  if (verdict.fixed.at < verdict.way.size()) deliver({{link, here.peer, Ctl::Verdict, verdict.body()}});
  for (auto& comm : failed) comm->mismatch(verdict.text);
}

}  // namespace pncpu
