// A session: who is in a communicator and how they are reached.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

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
  Pipe pipe[kChannels];
  int local = -1;  // index in the host's segment; -1 on another host
  bool same_process = false;
  bool direct = false;  // each reads and writes the other's memory
  Cell* cell = nullptr;
  Remote remote;
  bool left = false;              // under Session::mutex
  std::atomic<bool> gone{false};  // set under it; who tells of an error looks without
  Leaving leaving;
  std::unique_ptr<Stuck> stuck;  // the newest
  std::map<uint64_t, std::vector<char>> inbox;
  std::atomic<uint64_t> sends_issued{0}, recvs_issued{0};
  std::string str() const;
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

class Session {
 public:
  // What a session asks of the communicator that it belongs to.
  class Owner {
   public:
    virtual SinkPtr sink() = 0;  // who hears of the session's sockets
    virtual ncclResult_t error() const = 0;
    virtual std::string error_text() = 0;
    // Rank `peer` has left, so that what this rank is `doing` with it never ends.
    virtual void never_ends(int peer, const std::string& doing) = 0;

   protected:
    ~Owner() = default;
  };

  Session(Owner& owner, int device);
  void set_shape(int rank, int nranks);  // known late where ranks have to agree on it first

  int rank = 0, nranks = 0;
  uint64_t hash = 0;
  size_t inline_bytes, block_bytes, ring_bytes;  // equal on every rank once connected
  std::atomic<bool> left{false};                 // this rank has said that it leaves

  // Creation: introduces itself, joins an id's root where there is one, then connects to everyone in the
  // table.
  ncclResult_t introduce();
  PeerInfo self;
  ncclResult_t join(const Id& id, uint64_t ids_hash, std::vector<PeerInfo>* table);
  ncclResult_t connect(const std::vector<PeerInfo>& table);
  void stop();  // cuts all of that short, and exchanges
  bool stopped() const { return stopped_.load(); }

  // Ranks talk over their control sockets: everyone's blob, in the order of `ranks`.
  ncclResult_t exchange(uint64_t tag, const std::vector<int>& ranks, const std::vector<char>& mine,
                        std::vector<std::vector<char>>* all, const char* what);
  void arrived(const Hello& hello, SocketPtr socket);
  void exchanged(int from, uint64_t tag, std::vector<char> body);
  void send(int to, Ctl kind, const void* body, size_t bytes);  // nothing once the peer is gone
  bool linked(int to) const { return bool(peer(to).control); }
  void disconnect();
  void drop_connections();  // fault injection

  Peer& peer(int r) { return *peers_[size_t(r)]; }
  const Peer& peer(int r) const { return *peers_[size_t(r)]; }
  std::vector<std::unique_ptr<Peer>>& peers() { return peers_; }
  Segment* segment() { return segment_.get(); }
  Cell* cell() { return me_; }
  int local_index() const { return local_; }
  int local_ranks() const { return local_count_; }
  int hosts() const { return hosts_; }
  const Patience& patience(bool underway) const { return underway ? underway_patience_ : patience_; }

  std::mutex mutex;  // what peers have said
  std::condition_variable changed;

 private:
  ncclResult_t open_links(Deadline deadline);
  ncclResult_t share_segment(Deadline deadline);
  ncclResult_t settle(Deadline deadline);
  ncclResult_t link_failed(int peer, const char* doing, const std::string& why);
  ncclResult_t cut_off(int peer, const char* what, const std::string& why);
  void attach_pipes();
  void choose_patience();

  Owner& owner_;
  const int device_;
  bool direct_allowed_;
  std::atomic<bool> stopped_{false};
  SocketPtr waits_on_;  // what a creation waits on, which stop() cuts short
  std::vector<std::unique_ptr<Peer>> peers_;
  std::unique_ptr<Segment> segment_;
  Cell* me_ = nullptr;
  int local_ = 0, local_count_ = 1, hosts_ = 1;
  Patience patience_, underway_patience_;  // before a peer has come; while it is at work
  uint64_t nonce_[2];
  std::map<std::pair<int, int>, SocketPtr> waiting_;  // arrivals by kind and rank, during creation
};

}  // namespace pncpu
