// A session: who is in a communicator and how they are reached.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "service/join.hpp"
#include "streams/waiting.hpp"
#include "transport/segment.hpp"

namespace pncpu {

// How many calls a rank had issued when it left: what is beyond them will never come.
struct Leaving {
  uint64_t colls = 0, sends = 0, recvs = 0;
};

struct Peer {
  explicit Peer(const PeerInfo& info_) : info(info_) {}
  const PeerInfo& info;  // in the session's table
  SocketPtr control;     // under Session::mutex; none to a rank of this process
  bool linked = false;   // under it: frames reach the peer
  Link link;
  int local = -1;                 // index in the host's segment; -1 on another host
  bool same_process = false;      // shown by its token, which is one of this process's
  bool vouched = false;           // the kernel says that the pid it claims is its own
  bool left = false;              // under Session::mutex
  std::atomic<bool> gone{false};  // set under it; who tells of an error looks without
  Leaving leaving;
  std::atomic<uint64_t> sends_issued{0}, recvs_issued{0};
  std::atomic<uint64_t> sends_started{0}, recvs_started{0};  // the number of the newest that has its turn
  std::string str() const;
};

class Session {
 public:
  // What a session asks of the communicator that it belongs to.
  class Owner {
   public:
    virtual SinkPtr sink() = 0;  // who hears of the session's sockets
    virtual ErrorCode error_code() const = 0;
    ncclResult_t error() const { return error_code().result; }
    virtual std::string error_text() = 0;
    // Calls that do not fit together have ended it. What follows a death or a revocation still meets.
    virtual bool broken() const = 0;
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

  // Creation: introduces itself, joins the ids' roots where there are any, then connects to everyone in the
  // table. connect() is begin() and finish(); for ranks of one process that one thread connects, each first
  // begins.
  ncclResult_t introduce();
  PeerInfo self;
  ncclResult_t join(std::vector<Id> ids, uint64_t ids_hash, Table* table);
  ncclResult_t connect(const Table& table);
  ncclResult_t begin(const Table& table);
  ncclResult_t finish();
  void stop_creation();  // cuts that short, if it is not complete
  bool complete();       // false where it was stopped before
  void stop();           // cuts creation short, and exchanges
  bool stopped() const { return stop_.is_set(); }

  // Ranks talk over their control sockets: everyone's blob, in the order of `ranks`.
  // Each pair of ranks numbers its meetings, so every peer has a tag of its own.
  using Tags = std::vector<uint64_t>;
  ncclResult_t exchange(const Tags& tags, const std::vector<int>& ranks, const std::vector<char>& mine,
                        std::vector<Blob>* all, const char* what);
  // Ranks talk over their control links: everyone's blob, in the order of `ranks`.
  void arrived(const Hello& hello, SocketPtr socket);
  void exchanged(int from, uint64_t tag, const Blob& body);
  void send(int to, Ctl kind, const void* body, size_t bytes);  // nothing once the peer is gone
  int known_ranks();  // 0 until the table is there, however many a caller said
  bool linked(int to);
  void disconnect() noexcept;
  void drop_connections();  // fault injection

  Peer& peer(int r) { return *peers_[size_t(r)]; }
  std::vector<std::unique_ptr<Peer>>& peers() { return peers_; }
  Segment* segment() { return segment_.get(); }
  Cell* cell() { return me_; }
  int local_index() const { return local_; }
  int local_ranks() const { return local_count_; }
  // Ranks that reach each other's memory: consecutive ones of a host, as many in each team.
  int lsa_size() const { return lsa_size_; }
  const Patience& patience(bool underway) const { return underway ? underway_patience_ : patience_; }

  // Wakes who waits for what peers say, so that it looks at the communicator's error.
  void notify() {
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
  }
  std::mutex mutex;  // what peers have said
  std::condition_variable changed;

 private:
  // What is heard from ranks, each under its tag, by who waits for it.
  struct Gathering {
    std::map<int, uint64_t> tags;  // of those that are missing
    std::map<int, Blob> said;
  };

  ncclResult_t read_table();
  ncclResult_t check_devices();
  ncclResult_t open_links();
  ncclResult_t check_descriptors();
  SocketPtr await_arrival(HelloKind kind, int from, std::string* why);
  ncclResult_t share_segment();
  ncclResult_t create_segment();
  ncclResult_t receive_segment(int leader);
  ncclResult_t gone_from_here(int peer, const char* doing);
  ncclResult_t failed_before(int peer, const char* doing, const CtlHeader& header);
  ncclResult_t said_before(int peer, const char* doing, int error);
  ncclResult_t take_segment(int first);
  void attach_pipes();
  void say_settings();
  ncclResult_t say(const Tags& tags, const std::vector<int>& ranks, const Blob& mine, const char* what);
  ncclResult_t hear(const Tags& tags, const std::vector<int>& ranks, const Blob& mine, std::vector<Blob>* all,
                    const char* what, Deadline deadline);
  ncclResult_t link_failed(int peer, const char* doing, const std::string& why, int error);
  ncclResult_t cut_off(int peer, const char* what, const std::string& why);
  void choose_patience();
  std::vector<int> everyone() const;

  Owner& owner_;
  const int device_;
  bool direct_allowed_;
  Stop stop_;
  bool complete_ = false;         // under the mutex
  Deadline deadline_ = kForever;  // of the creation
  Table table_;
  std::vector<std::unique_ptr<Peer>> peers_;  // once the table is known
  std::shared_ptr<Segment> segment_;          // one for all ranks of this process
  bool offers_segment_ = false;
  Cell* me_ = nullptr;
  int local_ = 0, local_count_ = 1, hosts_ = 1, lsa_size_ = 1;
  Patience patience_, underway_patience_;  // before a peer has come; while it is at work
  uint64_t nonce_[2];
  Blob settings_;
  std::map<std::pair<int, int>, SocketPtr> waiting_;  // arrivals by kind and rank, during creation
  bool all_arrived_ = false, disconnected_ = false;
  Deadline tell_by_ = kForever;                       // those without a link, of a failure
  std::vector<Gathering*> gatherings_;                // open ones
  std::map<std::pair<int, uint64_t>, Blob> untaken_;  // said by a rank under a tag before it was waited for
};

}  // namespace pncpu
