// The point-to-point messages of one batch: in order for each pair of ranks, concurrently for all pairs.
#pragma once

#include <vector>

#include "ops/context.hpp"

namespace pncpu {

// As in NCCL, the messages of a group from a rank to itself must match. This sees them before they are
// issued, so the communicator stays usable.
ncclResult_t check_messages_to_itself(const std::vector<Op>& ops, int rank);

class P2p {
 public:
  explicit P2p(const Context& context) : context_(context) {}
  void start(const std::vector<Op>& ops);
  Step step();
  bool done() const { return left_ == 0; }
  struct Front {
    const Op* op = nullptr;
    uint64_t number = 0;  // 1-based, over the communicator's life
  };
  Front front_send(int peer) const;
  Front front_recv(int peer) const;
  uint64_t last_send(int peer) const;
  uint64_t last_recv(int peer) const;
  std::string str() const;

 private:
  // One direction between this rank and a peer.
  struct Lane {
    std::vector<const Op*> ops;
    size_t at = 0;
    uint64_t before = 0;  // messages of earlier batches
    bool begun = false;   // the header of ops[at] was sent, or received and compared
    size_t done = 0;      // bytes of ops[at]
    bool idle() const { return at == ops.size(); }
    const Op& op() const { return *ops[at]; }
    uint64_t number() const { return before + at + 1; }
    uint64_t last() const { return before + ops.size(); }
    Front front() const { return idle() ? Front() : Front{ops[at], number()}; }
  };
  struct Peer {
    Lane out, in;
    uint64_t lent = 0;  // messages that the peer reads directly
    uint64_t sender_address = 0;
  };
  void start_self(Peer& self);
  Step advance(Lane& lane, Step step);
  Step step_send(int p, Peer& peer);
  Step step_recv(int p, Peer& peer);
  Step match(int p, Peer& peer);
  bool is_small(const Op& op) const { return op.bytes() <= context_.inline_bytes; }
  const Context& context_;
  std::vector<Peer> peers_;
  size_t left_ = 0;
};

}  // namespace pncpu
