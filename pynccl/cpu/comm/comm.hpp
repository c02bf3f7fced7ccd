// A communicator: one rank's view of a group of ranks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/batch.hpp"
#include "comm/deadlock.hpp"
#include "comm/fate.hpp"
#include "comm/registry.hpp"
#include "comm/standing.hpp"
#include "comm/turns.hpp"
#include "ops/collectives.hpp"
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

  Standing standing;
  Registry registry;
  // Why a call is refused, or ncclSuccess. Certain under the issue lock. One that only takes what a peer has
  // sent is accepted after the peer's death, too: the message may have arrived.
  ncclResult_t check_accepts(const char* function, bool only_takes);
  ncclResult_t check_sound(const char* function, bool only_takes);

  // Calls. Issuing counts and numbers them; progress() is the current batch's, by whoever runs its stream.
  Turns turns;
  void count_issue(Op& op);  // numbers it
  Step progress(Batch& batch);
  void finish(Batch& batch);
  Doorbell& bell() { return session.cell() ? session.cell()->bell : own_bell_; }
  Patience patience() const { return session.patience(coll_.underway()); }
  std::string waiting_for(const Batch& batch);
  std::atomic<uint64_t> calls{0};  // for fault injection
  std::atomic<uint64_t> colls_issued{0};

  // For the search of deadlocks. What a batch waits for, by whoever runs it; nothing where the communicator
  // just failed.
  Wait waits_of(const Batch& batch);
  // Up to which number this rank has come, and has issued, of what a peer may need.
  void progress_towards(int peer, Need::Kind kind, uint64_t* started, uint64_t* issued);
  // The stream that holds all that is issued and not done; nullptr where there are several.
  std::shared_ptr<Stream> stream_of_all_pending();
  std::atomic<int> calling_thread{0};  // the newest that called, else the one that created it

  // Errors: the first one stays.
  bool decide(ErrorCode code, std::string_view text) noexcept;
  ncclResult_t say(ErrorCode code, std::string_view text) const noexcept;  // the thread's last error
  Step fail_with(ErrorCode code, std::string_view text, bool tell = true) noexcept;
  // The error of a call that has told its caller already.
  void give_up(ErrorCode code, std::string_view text) noexcept;
  Step mismatch(const std::string& text);
  void tell(ErrorCode code, std::string_view text) noexcept;  // to every peer, by name
  void tell_error() noexcept;
  // An error that a peer reports, or its death, becomes this communicator's when no call underway can go on,
  // or after a second: data that has arrived before is still delivered.
  void hear_of(ErrorCode code, std::string_view text) noexcept;
  ErrorCode error_code() const override {
    return !fate_.failed() && heard_.failed() && (turns.idle() || heard_long_ago()) ? heard_.code()
                                                                                    : fate_.code();
  }
  std::string error_text() override { return fate_.failed() ? fate_.text() : heard_.text(); }
  bool broken() const override {
    bool ready = standing.phase.load() != Phase::Creating;
    return ready && error() == ncclInvalidUsage && !standing.revoked.load();
  }
  void never_ends(int peer, const std::string& doing) override;
  // A rank that fails gives its buffers back to the caller, so nobody may use them any more (Link::enter).
  void close_buffers();

  void open();  // connected: from now on the end of a connection is a death
  ncclResult_t announce_leaving();
  ncclResult_t await_leaving();
  // Until every issued call has ended. Runs what the newest stream has, as every wait does.
  ncclResult_t drain(Deadline deadline);
  void issued_on(const std::shared_ptr<Stream>& stream);  // under the issue lock

  // What the service's thread tells
  void arrived(const Hello& hello, SocketPtr socket) override;
  void frame(int from, const CtlHeader& header, const Blob& body) override;
  void closed(int from) override;
  void data_ready() override { bell().ring(); }
  SinkPtr sink() override { return shared_from_this(); }

  Peer& peer(int r) { return session.peer(r); }
  Segment* segment() { return session.segment(); }
  Cell* cell() { return session.cell(); }

  // Ranks that meet in an exchange number their meetings, each pair its own: claimed in the order of the
  // calls, so that an exchange cannot meet another's.
  // After a failure they have numbers of their own: some ranks had begun another meeting by then, some not.
  std::vector<uint64_t> claim_meeting(const std::vector<int>& ranks, bool after_failure);
  std::unique_ptr<Id> grow_id;  // that this rank made for ncclCommGrow to use; under session.mutex

  // Communicators that are being made of this one, whose handles nobody has yet: an abort ends that too.
  void begin_child(const std::shared_ptr<Comm>& child);
  void end_child(const Comm& child);
  void stop_children();

 private:
  void error_told(int from, const Blob& body);
  void died(int from) noexcept;
  void note_started(const Batch& batch);
  Step advance(Batch& batch);
  void wake() noexcept;  // who waits for anything of this communicator
  bool heard_long_ago() const { return Clock::now() - heard_at_.load() > std::chrono::seconds(1); }
  bool more_may_come();
  Fate fate_, heard_;
  std::atomic<Clock::time_point> heard_at_{};
  std::vector<uint64_t> meetings_[2];            // with each rank; under session.mutex
  std::vector<std::shared_ptr<Comm>> children_;  // under it
  Doorbell own_bell_;
  std::atomic<Stream*> newest_{nullptr};
  std::weak_ptr<Stream> newest_owner_;  // under session.mutex
  uint64_t newest_since_ = 0;           // under it: the first ticket issued on it
  std::atomic<uint64_t> colls_started_{0};
  uint64_t coll_seq_ = 0;
  Context context_;  // what the operations see of this communicator, since open()
  Coll coll_;
  P2p p2p_;
};

template <>
struct HandleTraits<Comm> {
  static constexpr HandleKind kind = HandleKind::Comm;
  static constexpr char name[] = "comm", maker[] = "this library";
};

}  // namespace pncpu
