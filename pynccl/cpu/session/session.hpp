// A session: the ranks of a communicator and the connections to them.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "service/join.hpp"
#include "service/state.hpp"
#include "session/data_links.hpp"
#include "streams/waiting.hpp"
#include "transport/segment.hpp"

namespace pncpu {

// The number of calls that a rank had issued when it left: it makes no others.
struct Leaving {
  uint64_t colls = 0, sends = 0, recvs = 0;
  uint64_t signals = 0, awaited = 0;
};

struct Peer {
  explicit Peer(const PeerInfo& info_) : info(info_) {}
  const PeerInfo& info;  // in the session's table
  LinePtr line;          // under Session::mutex; none to a rank of this process
  bool linked = false;   // under it: frames reach the peer
  Link link;
  int local = -1;                   // index in the host's segment; -1 on another host
  bool same_process = false;        // its token is one of this process's
  bool shares_process = false;      // with another rank
  bool vouched = false;             // the kernel confirms the pid that it claims
  bool left = false;                // under Session::mutex
  std::atomic<bool> failed{false};  // it has reported an error, so its end is the consequence
  std::atomic<bool> gone{false};    // written under it; read without it to report errors
  Leaving leaving;
  std::atomic<uint64_t> sends_issued{0}, recvs_issued{0};
  std::atomic<uint64_t> sends_started{0}, recvs_started{0};  // the number of the last one started
  std::atomic<uint64_t> signals_issued{0}, signals_started{0}, signals_awaited{0};  // to and from the peer
  std::string str() const;
};

// The creations that this thread begins take no longer.
void limit_creations(double seconds);
// How long they may take.
double creation_limit();

class Session : private DataLinks::Owner {
 public:
  // A session's view of its communicator.
  class Owner {
   public:
    virtual SinkPtr sink() = 0;  // receives the events of the session's sockets
    virtual ErrorCode error_code() const = 0;
    ncclResult_t error() const { return error_code().result; }
    virtual std::string error_text() = 0;
    // Mismatched calls have ended the exchanges with such tags. After a death or a revocation ranks can still
    // exchange data.
    virtual bool broken(uint64_t tag) const = 0;
    virtual ncclResult_t say_broken(uint64_t tag) = 0;
    // Rank `peer` has left, so the operation `doing` with it never ends.
    virtual void never_ends(int peer, const std::string& doing) = 0;
    // For the deadlock search: an exchange waits for ranks, each with its tag; it has ended.
    virtual void meets(const void* exchange, const std::map<int, uint64_t>& missing, const std::string& doing,
                       double seconds) = 0;
    virtual void met(const void* exchange) = 0;
    // For an error that no call returns.
    virtual void give_up(ErrorCode code, std::string_view text, const LateRanks& late) noexcept = 0;
    virtual void wake() noexcept = 0;  // all threads that wait

   protected:
    ~Owner() = default;
  };

  Session(Owner& owner, int device);
  void set_shape(int rank, int nranks);  // late if the ranks must agree on it first

  int rank = 0, nranks = 0;
  uint64_t hash = 0;
  size_t inline_bytes, shown_bytes, board_bytes, block_bytes,
      ring_bytes;       // equal on every rank once connected
  bool by_hosts;        // the same; see Layout
  bool staged = false;  // the same; see Context
  // Of one-sided calls, and equal, too; the signals are those of one context.
  int contexts = 1, signals = 1;
  std::atomic<bool> left{false};  // this rank has said that it leaves

  // Creation: introduce(), join() the roots of the ids if there are any, then connect() to all ranks of the
  // table. connect() is begin() and finish(). A thread that connects several ranks calls begin() for all of
  // them first.
  ncclResult_t introduce();
  PeerInfo self;
  ncclResult_t join(std::vector<Id> ids, uint64_t ids_hash, Table* table);
  // Tells the ranks that join with an id the last error, for which this rank does not join.
  void refuse(const Id& id);
  ncclResult_t connect(const Table& table);
  ncclResult_t begin(const Table& table);
  ncclResult_t finish();
  double seconds;        // that the creation may take
  void stop_creation();  // makes the creation fail if it is not complete
  // Makes it fail unless this rank has a line to every other: then it hears itself of their ends.
  void stop_connecting();
  bool complete();  // false: it was stopped before
  void stop();      // makes the creation and exchanges fail
  bool stopped() const { return stop_.is_set(); }

  // Exchanges a blob with every rank over the lines; `all` is in the order of `ranks`. Each pair of
  // ranks numbers its exchanges, so every peer has its own tag.
  using Tags = std::vector<uint64_t>;
  ncclResult_t exchange(const Tags& tags, const std::vector<int>& ranks, const std::vector<char>& mine,
                        std::vector<Blob>* all, const char* what, double seconds);
  ncclResult_t lost_meanwhile(int q);  // fails: after an earlier failure this rank is gone, too
  bool awaits(int q);                  // an exchange has not heard of a rank
  void arrived(const Hello& hello, SocketPtr socket);
  void asked_to_dial(int from, uint64_t channel);
  void has_news();  // for the creation: look again
  void exchanged(int from, uint64_t tag, const Blob& body);
  // Sends a frame to this rank itself. It arrives after every frame that was sent before between ranks of
  // this process.
  void echo(Ctl kind, const void* body, size_t bytes);
  // No effect if the peer has gone.
  void send(int to, Ctl kind, const void* body, size_t bytes, uint64_t tag = 0);
  // The same for several peers, in one frame for all of a process.
  void send(const std::vector<int>& to, Ctl kind, const void* body, size_t bytes);
  bool has_room(int to);  // a large frame can be sent now; else the owner's sink hears of room
  int known_ranks();      // 0 before the table has arrived
  bool linked(int to);
  void describe(RankState state, std::vector<char>* out);  // nothing before the table has arrived
  void disconnect() noexcept;
  void drop_connections();  // fault injection

  Peer& peer(int r) { return *peers_[size_t(r)]; }
  std::vector<std::unique_ptr<Peer>>& peers() { return peers_; }
  Segment* segment() { return segment_.get(); }
  Cell* cell() { return me_; }
  int local_index() const { return local_; }
  // The size of LSA teams: consecutive ranks of a host that reach each other's memory.
  int lsa_size() const { return lsa_size_; }
  // For a thread that waits for peers on other hosts: whether data have come. Before it sleeps,
  // wake_on_data() has the owner's sink called if some come.
  bool data_came() { return links_ && links_->watch().look(); }
  void wake_on_data() const {
    if (links_) links_->watch().arm();
  }
  // For a rank that has no peers on its host: the arrival of data, on which a thread can sleep.
  DataWatch* data_alone() { return me_ || !links_ ? nullptr : &links_->watch(); }
  const WaitPolicy& wait_policy(bool underway) const { return underway ? underway_policy_ : wait_policy_; }

  // Wakes threads that wait for peers, so that they check the communicator's error.
  void notify() {
    std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
  }
  std::mutex mutex;  // for the state of peers
  std::condition_variable changed;

 private:
  // One waiting exchange: the blobs of the ranks, each under its tag.
  struct Gathering {
    std::map<int, uint64_t> tags;  // of the ranks that are missing
    std::map<int, Blob> said;
    bool searched = false;  // the deadlock search knows it
  };
  struct Listed;

  Announce announce() const;
  ncclResult_t read_table();
  ncclResult_t check_devices();
  ncclResult_t open_links();
  ncclResult_t check_descriptors();
  ncclResult_t open_lines();
  ncclResult_t call(int q, int attempt);
  ncclResult_t check_alive(int q);
  ncclResult_t await_news(uint64_t seen, int q, const char* doing);
  DataLinks* data_links();  // for other threads; nullptr: there are none yet
  ncclResult_t create_data_links();
  SocketPtr dial(int to, Channel channel, Stop& stop, std::string* why) override;
  bool await_acceptance(int to, Channel channel, const Socket& socket);
  void ask_to_dial(int to, Channel channel) override;
  bool is_gone(int q) override;
  bool cannot_connect(int q, const std::string& why, int error) override;
  void connected() override;
  SinkPtr keep_alive() override;
  ncclResult_t await_arrival(HelloKind kind, int from, const char* doing, SocketPtr* socket);
  ncclResult_t told_before(int q, const char* doing);
  uint64_t seen_news();
  ncclResult_t share_segment();
  ncclResult_t create_segment();
  ncclResult_t receive_segment(int leader);
  ncclResult_t gone_from_here(int peer, const char* doing);
  ncclResult_t take_segment(int first);
  ncclResult_t attach_pipes();
  void say_settings();
  ncclResult_t say(const Tags& tags, const std::vector<int>& ranks, const Blob& mine, const char* what);
  bool await_all(Gathering& g, std::unique_lock<std::mutex>& lock, const char* what, Deadline deadline,
                 const std::function<bool()>& done);
  ncclResult_t hear(const Tags& tags, const std::vector<int>& ranks, const Blob& mine, std::vector<Blob>* all,
                    const char* what, Deadline deadline, double limit, LateRanks* late = nullptr);
  std::string unreachable(int q, const char* doing, const std::string& why);
  ncclResult_t link_failed(int peer, const char* doing, const std::string& why, int error);
  ncclResult_t cut_off(int peer, const char* what, const std::string& why, uint64_t tag = 0);
  void choose_wait_policy();
  std::vector<int> everyone() const;

  Owner& owner_;
  const int device_;
  bool direct_allowed_;
  Stop stop_;
  bool complete_ = false;         // under the mutex
  Deadline deadline_ = kForever;  // of the creation
  Table table_;
  std::vector<std::unique_ptr<Peer>> peers_;  // once the table is known
  std::shared_ptr<Segment> segment_;          // shared by all ranks of this process
  bool offers_segment_ = false;
  std::unique_ptr<DataLinks> links_;  // if there are ranks on other hosts
  Cell* me_ = nullptr;
  int local_ = 0, local_count_ = 1, hosts_ = 1, lsa_size_ = 1;
  WaitPolicy wait_policy_, underway_policy_;  // before a peer has started the operation; afterwards
  uint64_t nonce_[2];
  Blob settings_;
  std::map<std::pair<int, int>, SocketPtr> waiting_;  // arrivals by kind and rank, during creation
  uint64_t news_ = 0;                                 // how often there were some
  bool all_linked_ = false, all_arrived_ = false, disconnected_ = false;
  Deadline tell_by_ = kForever;                       // to tell ranks without a link of a failure
  std::vector<Gathering*> gatherings_;                // exchanges that wait
  std::map<std::pair<int, uint64_t>, Blob> untaken_;  // blobs that came before their exchange
};

}  // namespace pncpu
