// Point-to-point messages of one batch: each pair of ranks in order, all pairs at once.
#pragma once

#include <vector>

#include "ops/ops.hpp"

namespace pncpu {

class P2p {
 public:
  explicit P2p(Comm& comm) : comm_(comm) {}
  Step start(const std::vector<Op>& ops);
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
  struct Lane {
    std::vector<const Op*> sends, recvs;
    size_t send_at = 0, recv_at = 0;
    uint64_t sends_before = 0, recvs_before = 0;
    uint64_t large_sent = 0;  // messages that the peer reads directly
    bool announced = false, matched = false;
    Header header;
    size_t sent = 0, received = 0;
  };
  Step start_self(Lane& lane);
  Step step_send(int peer, Lane& lane);
  Step step_recv(int peer, Lane& lane);
  Step match(int peer, Lane& lane);
  Step pull(int peer, Lane& lane);
  Comm& comm_;
  std::vector<Lane> lanes_;
  size_t left_ = 0;
};

}  // namespace pncpu
