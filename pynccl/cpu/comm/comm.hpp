// A communicator: one rank's view of a group of ranks.
#pragma once

#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "comm/batch.hpp"
#include "comm/comm_state.hpp"
#include "comm/deadlock.hpp"
#include "comm/kept_error.hpp"
#include "comm/loans.hpp"
#include "comm/registry.hpp"
#include "comm/turns.hpp"
#include "ops/collectives.hpp"
#include "ops/one_sided.hpp"
#include "ops/p2p.hpp"
#include "session/session.hpp"
#include "streams/domain.hpp"

namespace pncpu {

struct Comm final : Sink, Session::Owner, std::enable_shared_from_this<Comm> {
  Comm(int device, std::shared_ptr<Domain> domain);
  ~Comm() override;

  Session session;
  const int &rank = session.rank, &nranks = session.nranks;
  const int device;
  const uint64_t serial;  // of this process's communicators, from 1
  const std::shared_ptr<Domain> domain;
  ncclComm_t handle = nullptr;
  bool blocking = true;
  std::string name;
  double timeout_s = 0;
  bool blocking_calls = false;

  CommState comm_state;
  Registry registry;
  // Offers registered memory to the peers on this host, and withdraws it.
  void lend(const void* handle, const void* at, size_t size);
  void take_back(const void* handle);
  // ncclSuccess, or why a call is refused. The answer holds only under the issue lock. A receive
  // (`only_takes`) is accepted after the peer's death, too: the message may have arrived.
  ncclResult_t check_accepts(const char* function, bool only_takes);
  ncclResult_t check_sound(const char* function, bool only_takes);

  // Calls. count_issue() numbers them. The thread that runs the stream calls progress() for the current
  // batch.
  Turns turns;
  void count_issue(Op& op);
  Step progress(Batch& batch);
  void finish(Batch& batch);
  Doorbell& bell() { return session.cell() ? session.cell()->bell : own_bell_; }
  // Whether data have come from other hosts. Other threads may wait for them, and look only once.
  bool data_came() {
    if (!session.data_came()) return false;
    ring();
    return true;
  }
  void ring() {
    bell().ring();
    if (DataWatch* data = session.data_alone()) data->wake();
  }
  // Sleeps until the bell has rung since `seen`, or data have come, for the thread that has the turn.
  void sleep(uint32_t seen, int64_t ns);
  WaitPolicy wait_policy() const { return session.wait_policy(coll_.underway()); }
  std::string waiting_for(const Batch& batch);
  Choice choice(Func func, size_t bytes) const { return coll_.choice(func, bytes); }
  std::atomic<uint64_t> calls{0};  // for fault injection
  std::atomic<uint64_t> colls_issued{0};
  std::array<std::atomic<uint64_t>, size_t(Func::Send)> issued_by_func{};  // written under the issue lock

  // For the deadlock search. What a batch waits for; only for the thread that runs it. Nothing if the
  // communicator has just failed.
  Wait waits_of(const Batch& batch);
  // The numbers up to which this rank has started, and has issued, the operations that a peer needs.
  void progress_towards(int peer, Need::Kind kind, uint64_t* started, uint64_t* issued);
  // The stream of all pending operations; nullptr: several streams have some.
  std::shared_ptr<Stream> stream_of_all_pending();
  // The thread that makes this communicator's calls. 0: several do, or none has, and other communicators of
  // this process are not called by the threads that created them.
  int calling_thread() const;
  void called() noexcept;  // by this thread

  // Errors. The first error stays.
  bool decide(ErrorCode code, std::string_view text) noexcept;
  // This rank ends the calls for a reason of its own. An error that it has heard of before comes first. True:
  // the peers have not heard of the reason.
  bool stop_calls(std::string_view why) noexcept;
  ncclResult_t say(ErrorCode code, std::string_view text) const noexcept;  // sets the thread's last error
  Step fail_with(ErrorCode code, std::string_view text, bool tell = true) noexcept;
  // For an error that the call has returned to its caller already.
  void give_up(ErrorCode code, std::string_view text, const LateRanks& late) noexcept override;
  Step mismatch(const std::string& text);
  // The ranks of an exchange with this tag make different calls. The communicator fails, and no rank waits in
  // such an exchange any more, also after an earlier failure or a revocation.
  ncclResult_t disagree(uint64_t tag, const std::string& text);
  // Whether the caller has been told of the error.
  bool is_heard_of() const { return refused_.load() || reported_.load(); }
  // What a caller wants to know after a failure: what the ranks disagree on, else why the newest derived
  // communicator could not be created, else the first error.
  ErrorReport report();
  void tell(ErrorCode code, std::string_view text) noexcept;  // sends the error to every peer
  void tell_error() noexcept;
  // An error or death of a peer becomes this communicator's error when no running call can make progress, or
  // after a second: data that arrived before is still delivered.
  void hear_of(ErrorCode code, std::string_view text) noexcept;
  ErrorCode error_code() const override {
    return !kept_error_.failed() && heard_.failed() && (turns.idle() || heard_long_ago())
               ? heard_.code()
               : kept_error_.code();
  }
  std::string error_text() override { return kept_error_.failed() ? kept_error_.text() : heard_.text(); }
  bool broken(uint64_t tag) const override {
    bool ready = comm_state.phase.load() != Phase::Creating;
    bool failed_by_calls = ready && error() == ncclInvalidUsage && !comm_state.revoked.load();
    // The other ranks hear of the failure too, and refuse the calls for which this one waits. After a
    // revocation they do not.
    bool refused =
        ready && tag < kAfterFailure && heard_.failed() && heard_long_ago() && !comm_state.revoked.load();
    return failed_by_calls || refused || disagreement(tag).failed();
  }
  ncclResult_t say_broken(uint64_t tag) override;
  void never_ends(int peer, const std::string& doing) override;
  void meets(const void* exchange, const std::map<int, uint64_t>& missing, const std::string& doing,
             double seconds) override;
  void met(const void* exchange) override;
  // A rank that fails or ends returns its buffers to the caller, so peers must stop using them (Link::enter).
  void close_buffers();

  // Before the ranks connect: a peer that has finished may signal while this rank still creates.
  void expect_signals();
  uint64_t signals_pending(int peer, uint32_t signal) const { return one_sided_.pending(peer, signal); }
  void open();  // from now on the end of a connection is a death
  ncclResult_t announce_leaving();
  ncclResult_t await_leaving();
  bool awaits_leaving(int q);  // its finalization waits for that of a rank
  // Waits until every issued call has ended. Like every wait it runs the work of the newest stream.
  ncclResult_t drain(Deadline deadline);
  void issued_on(const std::shared_ptr<Stream>& stream);  // under the issue lock

  // Called by the service's thread
  void arrived(const Hello& hello, SocketPtr socket) override;
  void frame(int from, const CtlHeader& header, const Blob& body) override;
  void closed(int from) override;
  void data_ready() override { ring(); }
  void news() override { session.has_news(); }
  void describe(std::vector<char>* out) override;
  SinkPtr sink() override { return shared_from_this(); }

  Peer& peer(int r) { return session.peer(r); }
  Segment* segment() { return session.segment(); }
  Cell* cell() { return session.cell(); }

  // Each pair of ranks numbers its exchanges in the order of the calls, so that two exchanges are never
  // confused. After a failure a second sequence of numbers is used: some ranks may have begun an exchange
  // that others have not.
  std::vector<uint64_t> claim_meeting(const std::vector<int>& ranks, bool after_failure);
  std::vector<int> parent_ranks;  // by rank; set before the creation, empty without a parent
  std::unique_ptr<Id> grow_id;    // for ncclCommGrow, made by this rank; under session.mutex

  // Communicators that are being derived from this one. They have no handles yet; an abort ends them, too.
  void begin_child(const std::shared_ptr<Comm>& child);
  // The child connects these ranks of this communicator, by their exchange. If one of them has died, or has
  // failed in the exchange, the creation ends.
  using Members = std::map<int, uint64_t>;
  void connects(const Comm& child, const Members& members);
  LateRanks dead_ranks();
  // Why a child of these members could not be created: `seen`, unless one of them is missing.
  ncclResult_t explain(ncclResult_t seen, const Members& members);
  void end_child(const Comm& child, ErrorCode code, std::string_view why, const LateRanks& late) noexcept;
  void stop_children();

 private:
  // A communicator that is being created from this one.
  struct Derived {
    std::shared_ptr<Comm> comm;
    Members members{};  // once this rank knows them
  };
  std::vector<Derived>::iterator find_child(const Comm& child);  // under session.mutex
  bool is_dead(int q);                                           // under it
  int missing_of(const Members& members);                        // under it: one of them, or -1
  void end_missing();                                            // under it
  // This communicator or one that it is derived from, if it has heard of a failure.
  std::shared_ptr<Comm> that_heard();
  bool shares_process(int q);
  bool has_to_await(int q);
  void await_echo(Deadline deadline);
  void error_told(int from, const Blob& body);
  void put_arrived(int from, const Blob& body);
  bool maps_memory_of(int q);
  bool lent(int from, const CtlHeader& header, const Blob& body);
  void count_waits(Op& op);
  bool has_left(int q);
  std::string doing(const Batch& batch);
  void died(int from) noexcept;
  void note_started(const Batch& batch);
  Step advance(Batch& batch);
  void wake() noexcept override;
  bool heard_long_ago() const { return Clock::now() - heard_at_.load() > std::chrono::seconds(1); }
  bool more_may_come();
  const KeptError& disagreement(uint64_t tag) const { return disagreements_[tag / kAfterFailure]; }
  void heard_disagreement(int from, uint64_t tag, const Blob& body);
  KeptError kept_error_, heard_;
  KeptError disagreements_[2];  // by the sequence of exchanges
  std::atomic<Clock::time_point> heard_at_{};
  KeptError derivation_;                       // the newest one's, until the next call
  std::atomic<bool> refused_{false};           // a call after the failure
  std::atomic<bool> reported_{false};          // the error, by report()
  std::vector<uint64_t> meetings_[2];          // with each rank; under session.mutex
  std::vector<Derived> children_;              // under it
  std::set<std::pair<int, uint64_t>> absent_;  // under it: from Ctl::Absent
  std::weak_ptr<Comm> parent_;                 // set before the creation
  alignas(kCacheLine) Doorbell own_bell_;
  std::atomic<Stream*> newest_{nullptr};
  std::atomic<bool> finalizes_{false};  // it waits for the other ranks' finalization
  bool echoed_ = false;                 // under session.mutex: this rank's own Leaving frame has arrived
  const int creator_ = this_caller().thread;
  std::atomic<int> calling_thread_{0};
  std::weak_ptr<Stream> newest_owner_;  // under session.mutex
  uint64_t newest_since_ = 0;           // under it: the first ticket issued on it
  std::atomic<uint64_t> colls_started_{0};
  uint64_t coll_seq_ = 0;
  Context context_;  // the operations' view of this communicator; set by open()
  Coll coll_;
  P2p p2p_;
  OneSided one_sided_;
  Loans loans_;
  std::mutex puts_mutex_;  // held while the service's thread writes a window
  bool puts_closed_ = false;
};

template <>
struct HandleTraits<Comm> {
  static constexpr HandleKind kind = HandleKind::Comm;
  static constexpr char name[] = "comm", maker[] = "this library";
};

}  // namespace pncpu
