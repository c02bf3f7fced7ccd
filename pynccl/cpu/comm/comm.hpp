// A communicator: one rank's view of a group of ranks.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "ops/collectives.hpp"
#include "ops/ops.hpp"
#include "ops/p2p.hpp"
#include "streams/stream.hpp"
#include "service/service.hpp"
#include "transport/segment.hpp"

namespace pncpu {

// How many calls a rank had issued when it left: what is beyond them will never come.
struct Leaving {
  uint64_t colls = 0, sends = 0, recvs = 0;
};

// What a blocked rank tells every peer: what it needs of that peer (0: nothing of the kind), up to where its
// own current calls towards that peer go, and for whose current calls to end it waits.
struct Stuck {
  struct Edge {
    int32_t rank;
    uint64_t epoch;  // that rank's, when this was said
  };
  static constexpr int kMostEdges = 16;
  uint64_t epoch = 0, serial = 0;  // changes with every move; with every message
  uint64_t last_coll = 0, last_send = 0, last_recv = 0;
  int32_t edges = 0;
  Edge waits_for[kMostEdges] = {};
  char doing[128] = {};
};

struct Peer {
  PeerInfo info;
  SocketPtr control;
  Link link;
  int local = -1;  // index in the host's segment; -1 on another host
  bool same_process = false;
  bool left = false;              // under Comm::mutex
  std::atomic<bool> gone{false};  // set under it; who tells of an error looks without
  Leaving leaving;
  std::unique_ptr<Stuck> stuck;  // the newest
  std::map<uint64_t, std::vector<char>> inbox;
  std::atomic<uint64_t> sends_issued{0}, recvs_issued{0};
  std::string str() const;
};

// The calls of one group on one communicator; runs when its turn comes.
struct Batch {
  std::shared_ptr<Comm> comm;
  uint64_t ticket = 0;
  std::vector<Op> colls, p2p;
  bool started = false, done = false;
  ncclResult_t result = ncclSuccess;
  size_t at = 0;
};

struct Registration {
  void* buffer;
  size_t size;
  int flags;
  bool window;
};

struct RedOp {
  ncclDataType_t dtype;
  PreMul scalar;
  const void* device_scalar;
};

// How long a wait looks before it sleeps: alone on its core first, then letting others have the core.
struct Patience {
  int64_t spin_ns = 0, yield_ns = 0;
  int64_t interrupted_ns = 0;  // a single look that took longer lost the core to others; 0: not asked
  Patience with(const Patience& o) const {
    return {std::min(spin_ns, o.spin_ns), std::min(yield_ns, o.yield_ns),
            std::max(interrupted_ns, o.interrupted_ns)};
  }
};

enum class Phase { Creating, Ready, Finalizing, Finalized, Suspended };

struct Comm final : Sink, std::enable_shared_from_this<Comm> {
  explicit Comm(int device);
  ~Comm() override;
  void set_shape(int rank, int nranks);  // known late where ranks have to agree on it first

  int rank = 0, nranks = 0;
  const int device;
  const uint32_t generation;
  const uint64_t serial;  // of this process's communicators, from 1
  ncclComm_t handle = nullptr;
  bool blocking = true;
  uint64_t hash = 0;
  std::string name;
  std::shared_ptr<Stream> default_stream;

  // Creation: introduces itself, then connects to everyone in the table.
  ncclResult_t introduce();
  PeerInfo self;
  ncclResult_t connect(const std::vector<PeerInfo>& table);
  void open();  // connected: from now on the end of a connection is a death

  // Calls. issue() counts and numbers; progress() is the current batch's, by whoever runs its stream.
  uint64_t take_ticket() { return next_ticket_++; }
  void count_issue(const Op& op);
  Step progress(Batch& batch);
  void finish(Batch& batch);
  bool idle() const { return serving_.load() == next_ticket_; }
  bool turn_of(const Batch& batch) const { return serving_.load(std::memory_order_acquire) == batch.ticket; }
  Doorbell& bell() { return me_ ? me_->bell : own_bell_; }
  std::string waiting_for(const Batch& batch);
  void look_for_deadlock(const Batch& batch);
  uint64_t calls = 0;  // for fault injection
  std::atomic<uint64_t> colls_issued{0};

  // Errors: the first one stays.
  Step fail_with(ncclResult_t code, const std::string& text, bool tell = true);
  Step mismatch(const std::string& text);
  void tell_error();  // to every peer, by name
  // A rank that fails gives its buffers back to the caller, so nobody may write into them any more
  // (Link::write).
  void forbid_writes();
  ncclResult_t error() const { return error_.load(std::memory_order_acquire); }
  std::string error_text();

  // Ranks talk over their control sockets: everyone's blob, in the order of `ranks`.
  ncclResult_t exchange(uint64_t tag, const std::vector<int>& ranks, const std::vector<char>& mine,
                        std::vector<std::vector<char>>* all, const char* what);
  ncclResult_t announce_leaving();
  ncclResult_t await_leaving();
  ncclResult_t drain(Deadline deadline);  // until every issued call has ended
  void stop_creation();
  void disconnect();
  void drop_connections();  // fault injection

  // Sink
  void arrived(const Hello& hello, SocketPtr socket) override;
  void frame(int from, const CtlHeader& header, std::vector<char> body) override;
  void closed(int from) override;
  void data_ready() override { bell().ring(); }

  Peer& peer(int r) { return *peers_[size_t(r)]; }
  Segment* segment() { return segment_.get(); }
  Cell* cell() { return me_; }
  int local_index() const { return local_; }
  int local_ranks() const { return local_count_; }
  int hosts() const { return hosts_; }
  void set_pending(ncclResult_t state);
  ncclResult_t await_pending();  // until nothing runs in the background any more
  ncclResult_t pending() const { return pending_.load(); }

  std::atomic<Phase> phase{Phase::Creating};
  std::atomic<bool> revoked{false}, aborted{false}, left{false};
  std::mutex mutex;  // peers' mutable state, registrations, operations, the error's text
  std::condition_variable changed;
  std::map<void*, Registration> registrations;
  std::map<int, RedOp> red_ops;
  int next_red_op = ncclNumOps;
  uint64_t derived = 0;  // splits and grows so far, equal on every rank
  uint64_t shrunk = 0;   // shrinks, in which not every rank takes part
  bool grow_id_open = false;
  SocketPtr join_socket;  // what a creation waits on, which abort cuts short
  size_t inline_bytes, block_bytes, ring_bytes;
  Patience patience() const { return coll_.underway() ? underway_patience_ : patience_; }
  double timeout_s = 0;
  bool blocking_calls = false;

 private:
  ncclResult_t open_links(const std::vector<PeerInfo>& table, Deadline deadline);
  ncclResult_t share_segment(Deadline deadline);
  ncclResult_t settle(Deadline deadline);
  ncclResult_t link_failed(int peer, const char* doing, const std::string& why);
  ncclResult_t cut_off(int peer, const char* what, const std::string& why);
  void attach_pipes();
  void choose_patience();

  std::vector<std::unique_ptr<Peer>> peers_;
  std::unique_ptr<Segment> segment_;
  Cell* me_ = nullptr;
  Doorbell own_bell_;
  int local_ = 0, local_count_ = 1, hosts_ = 1;
  bool direct_allowed_ = true;
  Patience patience_, underway_patience_;  // before a peer has come; while it is at work
  uint64_t nonce_[2];
  uint64_t next_ticket_ = 0;
  std::atomic<uint64_t> serving_{0};
  std::atomic<ncclResult_t> error_{ncclSuccess}, pending_{ncclInProgress};
  std::string error_text_;
  std::map<std::pair<int, int>, SocketPtr> waiting_;  // arrivals by kind and rank, during creation
  void died(int from);
  Step never(int peer, const std::string& doing);
  std::vector<int> find_cycle(const Stuck& mine);
  uint64_t epoch_ = 0, serial_ = 0;
  std::map<int, std::pair<uint64_t, uint64_t>> suspects_;  // of the last cycle seen: rank to epoch and serial
  uint64_t coll_seq_ = 0;
  Context context_;  // what the operations see of this communicator, since open()
  Coll coll_;
  P2p p2p_;
};

HandleTable<Comm>& comms();

}  // namespace pncpu
