#include "ops/p2p.hpp"

#include "ops/matching.hpp"
#include "ops/moves.hpp"

namespace pncpu {

void P2p::start(const std::vector<Op>& ops) {
  peers_.resize(size_t(context_.nranks));
  left_ = ops.size();
  for (Peer& peer : peers_)
    for (Lane* lane : {&peer.out, &peer.in}) {
      lane->before += lane->ops.size();
      lane->ops.clear();
      lane->at = 0;
      lane->begun = false;
    }
  for (const Op& op : ops) {
    Peer& peer = peers_[size_t(op.root)];
    (op.func == Func::Send ? peer.out : peer.in).ops.push_back(&op);
  }
  if (!ops.empty()) start_self(peers_[size_t(context_.rank)]);
}

ncclResult_t check_messages_to_itself(const std::vector<Op>& ops, int rank) {
  std::vector<const Op*> sends, recvs;
  for (const Op& op : ops)
    if (op.root == rank) (op.func == Func::Send ? sends : recvs).push_back(&op);
  if (sends.size() != recvs.size())
    return fail(
        ncclInvalidUsage,
        "rank %d issued %zu sends to itself and %zu receives from itself in one group: they must pair up",
        rank, sends.size(), recvs.size());
  for (size_t i = 0; i < sends.size(); ++i) {
    const Op &s = *sends[i], &r = *recvs[i];
    if (s.count != r.count || s.dtype != r.dtype)
      return fail(ncclInvalidUsage, "rank %d sends itself %s and receives %s", rank,
                  header_of(s, 0).str().c_str(), header_of(r, 0).str().c_str());
  }
  return ncclSuccess;
}

void P2p::start_self(Peer& self) {
  size_t messages = self.out.ops.size();
  for (size_t i = 0; i < messages; ++i) {
    const Op &s = *self.out.ops[i], &r = *self.in.ops[i];
    if (s.bytes()) memmove(r.recv, s.send, s.bytes());
  }
  left_ -= 2 * messages;
  self.out.at = self.in.at = messages;
}

Step P2p::step() {
  bool moved = false;
  for (int i = 1; i < context_.nranks && left_; ++i) {
    int p = (context_.rank + i) % context_.nranks;
    Peer& peer = peers_[size_t(p)];
    for (bool more = true; more;) {
      more = false;
      for (Lane* lane : {&peer.out, &peer.in}) {
        if (lane->idle()) continue;
        Step s = advance(*lane, lane == &peer.out ? step_send(p, peer) : step_recv(p, peer));
        if (s == Step::Failed) return s;
        more = more || s == Step::Done;
        moved = moved || s != Step::Blocked;
      }
    }
  }
  return left_ == 0 ? Step::Done : moved ? Step::Moved : context_.blocked(kP2p);
}

// Goes to the next message if this one is done.
Step P2p::advance(Lane& lane, Step step) {
  if (step != Step::Done) return step;
  ++lane.at;
  --left_;
  lane.begun = false;
  return step;
}

Step P2p::step_send(int p, Peer& peer) {
  Lane& lane = peer.out;
  const Op& op = lane.op();
  Link& link = context_.link(p);
  Pipe& pipe = *link.pipe[kP2p];
  bool small = is_small(op);
  if (!lane.begun) {
    Header h = header_of(op, lane.number());
    h.root = 0;
    h.is_inline = small;
    h.payload = small ? uint32_t(op.bytes()) : 0;
    if (!pipe.put(&h, sizeof h, op.send, h.payload)) return Step::Blocked;
    lane.begun = true;
    lane.done = 0;
    if (!small && link.direct()) ++peer.lent;
  }
  if (small) return pipe.flush() ? Step::Done : Step::Blocked;
  if (link.direct())
    return link.theirs->taken.load(std::memory_order_acquire) >= peer.lent ? Step::Done : Step::Blocked;
  return pipe_out(pipe, static_cast<const char*>(op.send), op.bytes(), &lane.done);
}

// Compares the next header with the waiting receive.
Step P2p::match(int p, Peer& peer) {
  Lane& lane = peer.in;
  const Op& op = lane.op();
  Pipe& pipe = *context_.link(p).pipe[kP2p];
  Header theirs;
  if (!hear_header(pipe, &theirs)) return Step::Blocked;
  if (theirs.count != op.count || theirs.dtype != uint8_t(op.dtype))
    return context_.mismatch("rank " + std::to_string(p) + " sent rank " + std::to_string(context_.rank) +
                             " " + theirs.str() + ", which waited in " + header_of(op, 0).str() +
                             ": count and datatype must be equal");
  bool small = is_small(op);
  Step sound = check_header(context_, p, theirs, lane.number(), small, small ? op.bytes() : 0);
  if (sound == Step::Failed) return sound;
  pipe.consume(sizeof theirs);
  peer.sender_address = theirs.send;
  lane.begun = true;
  lane.done = 0;
  return Step::Done;
}

Step P2p::step_recv(int p, Peer& peer) {
  Lane& lane = peer.in;
  const Op& op = lane.op();
  if (!lane.begun) {
    Step s = match(p, peer);
    if (s != Step::Done) return s;
  }
  Link& link = context_.link(p);
  char* to = static_cast<char*>(op.recv);
  if (is_small(op) || !link.direct()) return pipe_in(*link.pipe[kP2p], to, op.bytes(), &lane.done);
  // Checks the sender's identity with the last slice, so that its death during the message is noticed.
  bool last = op.bytes() - lane.done <= kSlice;
  Step s = direct_in(context_, p, peer.sender_address, to, op.bytes(), &lane.done, last, "Recv");
  if (s != Step::Done) return s;
  link.mine->taken.fetch_add(1, std::memory_order_release);
  link.ring();
  return s;
}

P2p::Front P2p::front_send(int peer) const { return left_ ? peers_[size_t(peer)].out.front() : Front(); }
P2p::Front P2p::front_recv(int peer) const {
  if (left_ == 0 || peers_[size_t(peer)].in.begun) return {};
  return peers_[size_t(peer)].in.front();
}
uint64_t P2p::last_send(int peer) const { return peers_.empty() ? 0 : peers_[size_t(peer)].out.last(); }
uint64_t P2p::last_recv(int peer) const { return peers_.empty() ? 0 : peers_[size_t(peer)].in.last(); }

std::string P2p::str() const {
  std::string text;
  for (int p = 0; p < int(peers_.size()) && left_; ++p) {
    if (Front s = front_send(p); s.op)
      text += (text.empty() ? "" : ", ") + std::string("Send #") + std::to_string(s.number) + " to rank " +
              std::to_string(p);
    if (Front r = front_recv(p); r.op)
      text += (text.empty() ? "" : ", ") + std::string("Recv #") + std::to_string(r.number) + " from rank " +
              std::to_string(p);
  }
  return text;
}

}  // namespace pncpu
