#include "ops/collectives.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace pncpu {

void Coll::start(const Op& op, uint64_t seq) {
  op_ = op;
  large_ = op.bytes() > most_with_header(context_, op.func);
  windows_ = large_ && context_.windows ? context_.windows() : nullptr;
  registered_ = large_ && context_.registered ? context_.registered(seq) : nullptr;
  lent_.assign(size_t(context_.nranks), 0);
  if (registered_) offer_registered();
  matching_.start(op_, seq + pieces_, windows_ ? windows_->id() : 0, lent_);
  seq_ = seq;
  header_ = matching_.mine();
  is_cut_ = false;
  phase_ = Phase::Matching;
}

Step Coll::step() {
  bool matched = phase_ == Phase::Matching;
  if (matched) {
    Step s = matching_.step();
    if (s != Step::Done) return s;
    underway_.store(true, std::memory_order_relaxed);
    if (!is_cut_) find_mapped();
    if (!is_cut_ && is_to_cut()) {
      cut();
      return Step::Moved;
    }
    const Op& op = is_cut_ ? piece_ : op_;
    plan(op);
    executor_.start(op, schedule_, near_);
    phase_ = Phase::Moving;
  }
  Step s = executor_.step();
  if (s == Step::Done && is_cut_ && piece_at_ + piece_.count < op_.count) {
    piece_at_ += piece_.count;
    start_piece();
    return Step::Moved;
  }
  if (s == Step::Done) {
    windows_ = registered_ = nullptr;
    if (large_ && context_.finished) context_.finished(seq_);
    phase_ = Phase::Idle;
    underway_.store(false, std::memory_order_relaxed);
  }
  return matched && s == Step::Blocked ? Step::Moved : s;
}

// An exchange is an AllGather with a root.
bool Coll::is_to_cut() const {
  bool exchange = op_.func == Func::AllGather && op_.root;
  return large_ && !exchange && cuts(context_, op_.func) && !matching_.lent_by_any();
}

void Coll::cut() {
  if (piece_.func != op_.func || piece_.dtype != op_.dtype || cut_count_ != op_.count)
    tell(op_, algorithm_for(kind(op_.func, op_.bytes())));
  is_cut_ = true;
  cut_count_ = op_.count;
  piece_ = op_;
  piece_.stride = op_.bytes();
  // Equal pieces, but for the last; each begins with a cache line if the buffers do.
  size_t item = type_size(op_.dtype), most = most_with_header(context_, op_.func);
  size_t number = (op_.bytes() + most - 1) / most;
  size_t line = kCacheLine / item;
  piece_.count = std::min(most / kCacheLine * line, align_up((op_.count + number - 1) / number, line));
  piece_at_ = 0;
  start_piece();
}

void Coll::start_piece() {
  size_t at = piece_at_ * type_size(op_.dtype);
  piece_.count = std::min(piece_.count, op_.count - piece_at_);
  piece_.send = op_.send ? static_cast<const char*>(op_.send) + at : nullptr;
  piece_.recv = op_.recv ? static_cast<char*>(op_.recv) + at : nullptr;
  matching_.start_piece(piece_, seq_ + ++pieces_);
  phase_ = Phase::Matching;
}

void Coll::offer_registered() {
  for (int p = 0; p < context_.nranks; ++p) {
    if (p == context_.rank) continue;
    Access theirs = accessed(op_, context_.layout, context_.rank, p);
    auto lends = [&](const void* buffer, Part part) {
      return part.bytes &&
             registered_->lends(p, reinterpret_cast<uintptr_t>(buffer) + part.offset, part.bytes);
    };
    if (lends(op_.send, theirs.send)) lent_[size_t(p)] |= kSendLent;
    if (lends(op_.recv, theirs.recv)) lent_[size_t(p)] |= kRecvLent;
  }
}

// Only ranks with the same windows open use their mappings. Each knows what both have mapped, so both plan
// the same way, and the owner keeps its memory as long as the call runs.
bool Coll::same_windows(int peer) const {
  return windows_ && peer != context_.rank && context_.link(peer).cell &&
         matching_.header(peer).windows == windows_->id();
}

// What a header says of registered memory was mapped before it was sent, perhaps after this call started.
void Coll::find_mapped() {
  bool lent = false;
  for (int p = 0; p < context_.nranks && !lent; ++p) lent = matching_.header(p).lent != 0;
  if (lent && context_.registered) registered_ = context_.registered(seq());
  near_.assign(size_t(context_.nranks), Near());
  for (int p = 0; p < context_.nranks; ++p)
    if (p != context_.rank && context_.link(p).cell) near_[size_t(p)] = mapped_here(p);
}

char* Coll::memory_of(int peer, uint32_t lent, uint64_t address, size_t bytes) const {
  char* at = same_windows(peer) ? windows_->at(peer, address, bytes) : nullptr;
  if (at || !registered_ || !(matching_.header(peer).lent & lent)) return at;
  return registered_->at(peer, address, bytes);
}

bool Coll::lends(int peer, uint32_t lent, uint64_t address, size_t bytes) const {
  return (lent_[size_t(peer)] & lent) || (same_windows(peer) && windows_->lends(peer, address, bytes));
}

// The buffers of a peer that an algorithm uses.
Near Coll::mapped_here(int peer) const {
  const Header& theirs = matching_.header(peer);
  Access mine = accessed(op_, context_.layout, peer, context_.rank);
  auto base = [&](uint32_t lent, uint64_t buffer, Part part) {
    char* at = part.bytes ? memory_of(peer, lent, buffer + part.offset, part.bytes) : nullptr;
    return at ? at - part.offset : nullptr;
  };
  return {base(kSendLent, theirs.send, mine.send), base(kRecvLent, theirs.recv, mine.recv)};
}

// Whether this rank and the peer map what they need of each other. The peer finds the same.
bool Coll::reach_each_other(int peer) const {
  if (!context_.link(peer).cell) return false;
  const Header& mine = matching_.mine();
  const Near& near = near_[size_t(peer)];
  Access here = accessed(op_, context_.layout, context_.rank, peer);
  Access there = accessed(op_, context_.layout, peer, context_.rank);
  if ((there.send.bytes && !near.send) || (there.recv.bytes && !near.recv)) return false;
  auto lent = [&](uint32_t which, uint64_t buffer, Part part) {
    return !part.bytes || lends(peer, which, buffer + part.offset, part.bytes);
  };
  return lent(kSendLent, mine.send, here.send) && lent(kRecvLent, mine.recv, here.recv);
}

// Programs repeat their calls: reuse the last schedule if it fits.
void Coll::plan(const Op& op) {
  size_t item = type_size(op.dtype), stride = op.stride ? op.stride : op.bytes();
  direct_.resize(size_t(context_.nranks));
  for (int p = 0; p < context_.nranks; ++p)
    direct_[size_t(p)] = p != context_.rank && (context_.link(p).direct() || reach_each_other(p));
  if (planned_ && call_.func == op.func && call_.root == op.root && call_.count == op.count &&
      call_.item == item && call_.stride == stride && call_.direct == direct_)
    return;
  planned_ = false;
  call_ = Call{kind(op.func, op.bytes()), op.root, op.count, item, stride, context_.rank, direct_};
  call_.cut = false;  // here a piece runs, or a call that is not cut since a rank lends memory
  schedule_.clear();
  const Algorithm& chosen = algorithm_for(call_);
  if (!is_cut_) tell(op, chosen);
  chosen.plan(call_, &schedule_);
  planned_ = true;
}

void Coll::tell(const Op& op, const Algorithm& chosen) const {
  log(Level::Info, "%s of %zu elements of %zu B: algorithm \"%s\", %d ranks on %zu hosts", func_name(op.func),
      op.count, type_size(op.dtype), chosen.name, context_.nranks, context_.layout.hosts.size());
}

CallKind Coll::kind(Func func, size_t bytes) const {
  bool payloads = bytes <= most_with_header(context_, func);
  bool cut = !payloads && cuts(context_, func);
  return {func, context_.nranks, payloads, bytes <= context_.inline_bytes, cut, &context_.layout};
}

Choice Coll::choice(Func func, size_t bytes) const {
  const Algorithm& chosen = algorithm_for(kind(func, bytes));
  size_t all = most_with_header(context_, func);
  for (size_t most : {std::min(context_.inline_bytes, all), all})
    if (bytes <= most && &algorithm_for(kind(func, most + 1)) != &chosen) return {chosen.name, most};
  return {chosen.name, SIZE_MAX};
}

std::vector<int> Coll::missing() const {
  return phase_ == Phase::Matching && !is_cut_ ? matching_.missing() : std::vector<int>();
}

std::string Coll::str() const { return header_.str() + " #" + std::to_string(matching_.number()); }

}  // namespace pncpu
