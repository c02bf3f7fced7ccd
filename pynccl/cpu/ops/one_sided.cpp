#include "ops/one_sided.hpp"

#include <algorithm>

#include "ops/moves.hpp"

namespace pncpu {
namespace {

constexpr size_t kFrameBytes = size_t(512) << 10;

}  // namespace

void OneSided::open(int nranks, int signals) {
  signals_ = signals;
  size_t all = size_t(nranks) * size_t(signals);
  heard_ = std::make_unique<std::atomic<uint64_t>[]>(all);
  taken_ = std::make_unique<std::atomic<uint64_t>[]>(all);
  lanes_.resize(size_t(nranks));
}

void OneSided::start(const std::vector<Op>& ops) {
  left_ = ops.size();
  for (Lane& lane : lanes_) lane.ops.clear(), lane.at = lane.done = 0;
  waits_.clear();
  for (const Op& op : ops)
    if (op.func == Func::WaitSignal)
      waits_.push_back({op.one_sided.get(), 0});
    else
      lanes_[size_t(op.root)].ops.push_back(&op);
}

// The waits of a batch come last: its puts may be what a peer waits for.
Step OneSided::step() {
  bool moved = false;
  for (int i = 0; i < context_.nranks && left_; ++i) {
    int peer = (context_.rank + i) % context_.nranks;
    Lane& lane = lanes_[size_t(peer)];
    while (!lane.idle()) {
      Step s = step_lane(peer, lane);
      if (s == Step::Failed) return s;
      if (s == Step::Blocked) break;
      moved = true;
      if (s == Step::Moved) continue;
      ++lane.at, lane.done = 0;
      --left_;
    }
  }
  for (size_t i = 0; i < waits_.size(); ++i) {
    Waiting& waiting = waits_[i];
    if (waiting.at == waiting.call->waits.size()) continue;
    if (!step_wait(waiting)) break;  // a later wait for the same signal takes later ones
    moved = true;
    --left_;
  }
  return left_ == 0 ? Step::Done : moved ? Step::Moved : Step::Blocked;
}

Step OneSided::step_lane(int peer, Lane& lane) {
  const Op& op = lane.op();
  if (op.bytes() > lane.done) {
    Step s = put(peer, lane);
    if (s != Step::Done) return s;
  }
  return signal(peer, lane) ? Step::Done : Step::Blocked;
}

Step OneSided::put(int peer, Lane& lane) {
  const Op& op = lane.op();
  const Target& target = op.one_sided->target;
  auto from = static_cast<const char*>(op.send);
  if (peer == context_.rank) {
    memmove(target.mapped, from, op.bytes());
    lane.done = op.bytes();
    return Step::Done;
  }
  const Link& link = context_.link(peer);
  if (target.mapped) {
    size_t n = std::min(op.bytes() - lane.done, kSlice);
    // A peer that refuses has failed; its error will arrive.
    if (!link.copy(target.mapped + lane.done, from + lane.done, n)) return Step::Blocked;
    lane.done += n;
    return lane.done == op.bytes() ? Step::Done : Step::Moved;
  }
  if (link.direct())
    return direct_out(context_, peer, from, target.address, op.bytes(), &lane.done, "PutSignal");
  return put_frames(peer, lane);
}

Step OneSided::put_frames(int peer, Lane& lane) {
  const Op& op = lane.op();
  const Target& target = op.one_sided->target;
  if (!context_.has_room(peer)) return Step::Blocked;
  size_t n = std::min(op.bytes() - lane.done, kFrameBytes);
  PutHead head{target.window, target.offset + lane.done, 0, 1, 0, {}};
  context_.post(peer, head, static_cast<const char*>(op.send) + lane.done, n);
  lane.framed = true;
  lane.done += n;
  return lane.done == op.bytes() ? Step::Done : Step::Moved;
}

bool OneSided::signal(int peer, Lane& lane) {
  uint32_t signal = lane.op().one_sided->signal;
  if (peer == context_.rank) return arrived(peer, signal), true;
  const Link& link = context_.link(peer);
  if (link.counters_out && !lane.framed) {
    link.counters_out[signal].fetch_add(1, std::memory_order_release);
    link.ring();
    return true;
  }
  if (!context_.has_room(peer)) return false;
  context_.post(peer, {0, 0, signal, 0, 1, {}}, nullptr, 0);
  return true;
}

bool OneSided::step_wait(Waiting& waiting) {
  const std::vector<Awaited>& waits = waiting.call->waits;
  for (; waiting.at < waits.size(); ++waiting.at) {
    const Awaited& wait = waits[waiting.at];
    if (pending(wait.peer, wait.signal) < wait.count) return false;
    taken_[place(wait.peer, wait.signal)].fetch_add(wait.count, std::memory_order_relaxed);
  }
  return true;
}

uint64_t OneSided::counted(int peer, uint32_t signal) const {
  uint64_t count = heard(peer, signal).load(std::memory_order_acquire);
  if (peer == context_.rank) return count;
  const std::atomic<uint64_t>* shared = context_.link(peer).counters_in;
  return shared ? count + shared[signal].load(std::memory_order_acquire) : count;
}

// Read `taken_` first: another thread may take what has just arrived.
uint64_t OneSided::pending(int peer, uint32_t signal) const {
  uint64_t taken = taken_[place(peer, signal)].load(std::memory_order_relaxed);
  return counted(peer, signal) - taken;
}

std::vector<Awaited> OneSided::awaited() const {
  std::vector<Awaited> missing;
  for (const Waiting& waiting : waits_) {
    const std::vector<Awaited>& waits = waiting.call->waits;
    missing.insert(missing.end(), waits.begin() + ptrdiff_t(waiting.at), waits.end());
  }
  return missing;
}

std::vector<int> OneSided::targets() const {
  std::vector<int> peers;
  for (size_t peer = 0; peer < lanes_.size() && left_; ++peer)
    if (!lanes_[peer].idle()) peers.push_back(int(peer));
  return peers;
}

std::string OneSided::str() const {
  std::string text;
  auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  for (int peer = 0; peer < int(lanes_.size()); ++peer)
    if (const Lane& lane = lanes_[size_t(peer)]; !lane.idle())
      add(std::string(func_name(lane.op().func)) + " to rank " + std::to_string(peer));
  for (const Awaited& wait : awaited()) {
    uint64_t came = pending(wait.peer, wait.signal);
    add("WaitSignal for " + std::to_string(wait.count) + " of signal " + std::to_string(wait.signal) +
        " from rank " + std::to_string(wait.peer) + ", of which " +
        std::to_string(std::min(came, wait.count)) + " arrived");
  }
  return text;
}

}  // namespace pncpu
