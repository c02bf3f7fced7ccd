#include "ops/p2p.hpp"

#include <algorithm>

#include "comm/comm.hpp"

namespace pncpu {
namespace {
constexpr size_t kSlice = size_t(1) << 20;
}

Step P2p::start(const std::vector<Op>& ops) {
  lanes_.resize(size_t(comm_.nranks));
  left_ = ops.size();
  for (Lane& lane : lanes_) {
    lane.sends_before += lane.sends.size();
    lane.recvs_before += lane.recvs.size();
    lane.sends.clear();
    lane.recvs.clear();
    lane.send_at = lane.recv_at = 0;
    lane.announced = lane.matched = false;
  }
  for (const Op& op : ops) {
    Lane& lane = lanes_[size_t(op.root)];
    (op.func == Func::Send ? lane.sends : lane.recvs).push_back(&op);
  }
  return ops.empty() ? Step::Done : start_self(lanes_[size_t(comm_.rank)]);
}

// Messages to oneself are matched within the group, as NCCL does: nobody else could.
Step P2p::start_self(Lane& lane) {
  if (lane.sends.size() != lane.recvs.size())
    return comm_.fail_with(ncclInvalidUsage, "rank " + std::to_string(comm_.rank) + " issued " +
                                                 std::to_string(lane.sends.size()) + " sends to itself and " +
                                                 std::to_string(lane.recvs.size()) +
                                                 " receives from itself in one group: they must pair up");
  for (size_t i = 0; i < lane.sends.size(); ++i) {
    const Op &s = *lane.sends[i], &r = *lane.recvs[i];
    if (s.count != r.count || s.dtype != r.dtype)
      return comm_.fail_with(ncclInvalidUsage, "rank " + std::to_string(comm_.rank) + " sends itself " +
                                                   header_of(s, 0).str() + " and receives " +
                                                   header_of(r, 0).str());
    if (s.bytes()) memmove(r.recv, s.send, s.bytes());
  }
  left_ -= 2 * lane.sends.size();
  lane.send_at = lane.recv_at = lane.sends.size();
  return Step::Done;
}

Step P2p::step() {
  bool moved = false;
  for (int i = 1; i < comm_.nranks && left_; ++i) {
    int p = (comm_.rank + i) % comm_.nranks;
    Lane& lane = lanes_[size_t(p)];
    for (bool more = true; more;) {
      more = false;
      if (lane.send_at < lane.sends.size()) {
        Step s = step_send(p, lane);
        if (s == Step::Failed) return s;
        if (s == Step::Done) {
          ++lane.send_at;
          --left_;
          lane.announced = false;
          more = true;
        }
        moved = moved || s != Step::Blocked;
      }
      if (lane.recv_at < lane.recvs.size()) {
        Step s = step_recv(p, lane);
        if (s == Step::Failed) return s;
        if (s == Step::Done) {
          ++lane.recv_at;
          --left_;
          lane.matched = false;
          more = true;
        }
        moved = moved || s != Step::Blocked;
      }
    }
  }
  return left_ == 0 ? Step::Done : moved ? Step::Moved : Step::Blocked;
}

Step P2p::step_send(int p, Lane& lane) {
  const Op& op = *lane.sends[lane.send_at];
  Peer& peer = comm_.peer(p);
  Pipe& pipe = peer.pipe[kP2p];
  size_t bytes = op.bytes();
  bool small = bytes <= comm_.session.inline_bytes;
  if (!lane.announced) {
    Header h = header_of(op, lane.sends_before + lane.send_at + 1);
    h.root = 0;
    h.is_inline = small;
    h.payload = small ? uint32_t(bytes) : 0;
    if (!pipe.put(&h, sizeof h, op.send, h.payload)) return Step::Blocked;
    lane.announced = true;
    lane.sent = 0;
    if (!small && peer.direct) ++lane.large_sent;
  }
  if (small) return pipe.flush() ? Step::Done : Step::Blocked;
  if (peer.direct) {
    uint64_t acked =
        comm_.segment()->acked(comm_.session.local_index(), peer.local).load(std::memory_order_acquire);
    return acked >= lane.large_sent ? Step::Done : Step::Blocked;
  }
  size_t n = lane.sent < bytes ? pipe.write(static_cast<const char*>(op.send) + lane.sent,
                                            std::min(bytes - lane.sent, kSlice))
                               : 0;
  lane.sent += n;
  if (lane.sent == bytes && pipe.flush()) return Step::Done;
  return n ? Step::Moved : Step::Blocked;
}

// Reads the header at the head of the lane and compares it with the receive that waits.
Step P2p::match(int p, Lane& lane) {
  const Op& op = *lane.recvs[lane.recv_at];
  Pipe& pipe = comm_.peer(p).pipe[kP2p];
  size_t readable = pipe.readable();
  if (readable < sizeof lane.header) return Step::Blocked;
  pipe.copy_out(0, &lane.header, sizeof lane.header);
  if (lane.header.count != op.count || lane.header.dtype != uint8_t(op.dtype))
    return comm_.mismatch("rank " + std::to_string(p) + " sent rank " + std::to_string(comm_.rank) + " " +
                          lane.header.str() + ", which waited in " + header_of(op, 0).str() +
                          ": count and datatype must be equal");
  if (readable < sizeof lane.header + lane.header.payload) return Step::Blocked;
  pipe.consume(sizeof lane.header);
  lane.matched = true;
  lane.received = 0;
  return Step::Done;
}

Step P2p::step_recv(int p, Lane& lane) {
  if (!lane.matched) {
    Step s = match(p, lane);
    if (s != Step::Done) return s;
  }
  return pull(p, lane);
}

Step P2p::pull(int p, Lane& lane) {
  const Op& op = *lane.recvs[lane.recv_at];
  Peer& peer = comm_.peer(p);
  size_t bytes = op.bytes();
  char* to = static_cast<char*>(op.recv) + lane.received;
  if (!lane.header.is_inline && peer.direct) {
    size_t n = std::min(bytes - lane.received, kSlice);
    if (peer.same_process) {
      memcpy(to, reinterpret_cast<const char*>(lane.header.send) + lane.received, n);
    } else {
      // A sender that died during the message is noticed at its end at the latest.
      bool last = lane.received + n == bytes;
      RemoteResult r = read_remote(peer.remote, to, lane.header.send + lane.received, n, last);
      if (r != RemoteResult::Ok) return comm_.remote_failed(p, r, "Recv");
    }
    lane.received += n;
    if (lane.received < bytes) return Step::Moved;
    comm_.segment()->acked(peer.local, comm_.session.local_index()).fetch_add(1, std::memory_order_release);
    peer.cell->bell.ring();
    return Step::Done;
  }
  Pipe& pipe = peer.pipe[kP2p];
  size_t n = std::min(pipe.readable(), bytes - lane.received);
  if (n) {
    pipe.copy_out(0, to, n);
    pipe.consume(n);
    lane.received += n;
  }
  return lane.received == bytes ? Step::Done : n ? Step::Moved : Step::Blocked;
}

P2p::Front P2p::front_send(int peer) const {
  if (left_ == 0) return {};
  const Lane& l = lanes_[size_t(peer)];
  if (l.send_at >= l.sends.size()) return {};
  return {l.sends[l.send_at], l.sends_before + l.send_at + 1};
}
P2p::Front P2p::front_recv(int peer) const {
  if (left_ == 0) return {};
  const Lane& l = lanes_[size_t(peer)];
  if (l.recv_at >= l.recvs.size() || l.matched) return {};
  return {l.recvs[l.recv_at], l.recvs_before + l.recv_at + 1};
}
uint64_t P2p::last_send(int peer) const {
  return lanes_.empty() ? 0 : lanes_[size_t(peer)].sends_before + lanes_[size_t(peer)].sends.size();
}
uint64_t P2p::last_recv(int peer) const {
  return lanes_.empty() ? 0 : lanes_[size_t(peer)].recvs_before + lanes_[size_t(peer)].recvs.size();
}

std::string P2p::str() const {
  std::string text;
  for (int p = 0; p < int(lanes_.size()) && left_; ++p) {
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
