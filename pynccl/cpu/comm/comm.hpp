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
#include "session/session.hpp"
#include "streams/stream.hpp"

namespace pncpu {

// What a text begins with, at this rank or another, that is about calls which do not fit together: pynccl's
// Python knows a mismatch by it.
constexpr char kMismatch[] = "the ranks called different things: ";

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

enum class Phase { Creating, Ready, Finalizing, Finalized, Suspended };

struct Comm final : Sink, Session::Owner, std::enable_shared_from_this<Comm> {
  explicit Comm(int device);
  ~Comm() override;

  Session session;
  const int &rank = session.rank, &nranks = session.nranks;
  const int device;
  const uint32_t generation;
  const uint64_t serial;  // of this process's communicators, from 1
  ncclComm_t handle = nullptr;
  bool blocking = true;
  std::string name;
  std::shared_ptr<Stream> default_stream;

  void open();  // connected: from now on the end of a connection is a death

  // Calls. issue() counts and numbers; progress() is the current batch's, by whoever runs its stream.
  uint64_t take_ticket() { return next_ticket_++; }
  void count_issue(const Op& op);
  Step progress(Batch& batch);
  void finish(Batch& batch);
  bool idle() const { return serving_.load() == next_ticket_; }
  bool turn_of(const Batch& batch) const { return serving_.load(std::memory_order_acquire) == batch.ticket; }
  Doorbell& bell() { return session.cell() ? session.cell()->bell : own_bell_; }
  void ring_peers();
  std::string waiting_for(const Batch& batch);
  void look_for_deadlock(const Batch& batch);
  uint64_t calls = 0;  // for fault injection
  std::atomic<uint64_t> colls_issued{0};

  // Errors: the first one stays.
  Step fail_with(ncclResult_t code, const std::string& text, bool tell = true);
  Step mismatch(const std::string& text);
  void tell_error();  // to every peer, by name
  // A rank that fails gives its buffers back to the caller, so nobody may write into them any more: a writer
  // says that it writes, then looks whether it may; a failing rank forbids it, then waits for those who
  // write.
  bool begin_write(int peer);
  void end_write(int peer);
  void forbid_writes();
  Step remote_failed(int peer, RemoteResult result, const char* doing);
  ncclResult_t error() const override { return error_.load(std::memory_order_acquire); }
  std::string error_text() override;
  void never_ends(int peer, const std::string& doing) override;

  ncclResult_t announce_leaving();
  ncclResult_t await_leaving();
  ncclResult_t drain(Deadline deadline);  // until every issued call has ended
  SinkPtr sink() override { return shared_from_this(); }

  // Sink
  void arrived(const Hello& hello, SocketPtr socket) override;
  void frame(int from, const CtlHeader& header, std::vector<char> body) override;
  void closed(int from) override;
  void data_ready() override { bell().ring(); }

  Peer& peer(int r) { return session.peer(r); }
  Segment* segment() { return session.segment(); }
  Cell* cell() { return session.cell(); }
  void set_pending(ncclResult_t state);
  ncclResult_t await_pending();  // until nothing runs in the background any more
  ncclResult_t pending() const { return pending_.load(); }

  std::atomic<Phase> phase{Phase::Creating};
  std::atomic<bool> revoked{false};
  std::mutex& mutex = session.mutex;  // also: registrations, operations, the error's text
  std::condition_variable& changed = session.changed;
  std::map<void*, Registration> registrations;
  std::map<int, RedOp> red_ops;
  int next_red_op = ncclNumOps;
  uint64_t derived = 0;  // splits and grows so far, equal on every rank
  uint64_t shrunk = 0;   // shrinks, in which not every rank takes part
  bool grow_id_open = false;
  Patience patience() const { return session.patience(coll_.underway()); }
  double timeout_s = 0;
  bool blocking_calls = false;

 private:
  Doorbell own_bell_;
  uint64_t next_ticket_ = 0;
  std::atomic<uint64_t> serving_{0};
  std::atomic<ncclResult_t> error_{ncclSuccess}, pending_{ncclInProgress};
  std::string error_text_;
  void died(int from);
  std::vector<int> find_cycle(const Stuck& mine);
  uint64_t epoch_ = 0, serial_ = 0;
  std::map<int, std::pair<uint64_t, uint64_t>> suspects_;  // of the last cycle seen: rank to epoch and serial
  uint64_t coll_seq_ = 0;
  Coll coll_;
  P2p p2p_;
};

HandleTable<Comm>& comms();

}  // namespace pncpu
