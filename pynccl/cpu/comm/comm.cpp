#include "comm/comm.hpp"

#include <sched.h>

#include <algorithm>

namespace pncpu {
namespace {

constexpr char kReports[] = " reports: ";

uint64_t next_serial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

HandleTable<Comm>& comms() {
  static auto* table = new HandleTable<Comm>;
  return *table;
}

Comm::Comm(int device_)
    : session(*this, device_),
      device(device_),
      generation(process_generation()),
      serial(next_serial()),
      coll_(*this),
      p2p_(*this) {
  timeout_s = param_seconds("PYNCCL_CPU_TIMEOUT");
  blocking_calls = param_int("PYNCCL_CPU_BLOCKING") != 0;
}

Comm::~Comm() = default;

void Comm::set_pending(ncclResult_t state) {
  std::lock_guard<std::mutex> lock(mutex);
  pending_.store(state);
  changed.notify_all();
}

ncclResult_t Comm::await_pending() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return pending_.load() != ncclInProgress; });
  return pending_.load();
}

void Comm::count_issue(const Op& op) {
  if (!is_p2p(op.func))
    ++colls_issued;
  else
    ++(op.func == Func::Send ? peer(op.root).sends_issued : peer(op.root).recvs_issued);
}

Step Comm::progress(Batch& batch) {
  if (!turn_of(batch)) return Step::Blocked;
  if (error() != ncclSuccess) return forbid_writes(), Step::Failed;
  bool moved = !batch.started;
  if (!batch.started) {
    batch.started = true;
    if (p2p_.start(batch.p2p) == Step::Failed) return forbid_writes(), Step::Failed;
    if (!batch.colls.empty()) coll_.start(batch.colls[0], ++coll_seq_);
  }
  while (batch.at < batch.colls.size()) {
    Step s = coll_.step();
    if (s == Step::Failed) return forbid_writes(), s;
    moved = moved || s != Step::Blocked;
    if (s != Step::Done) break;
    if (++batch.at < batch.colls.size()) coll_.start(batch.colls[batch.at], ++coll_seq_);
  }
  if (!p2p_.done()) {
    Step s = p2p_.step();
    if (s == Step::Failed) return forbid_writes(), s;
    moved = moved || s != Step::Blocked;
  }
  ring_peers();
  if (batch.at == batch.colls.size() && p2p_.done()) return Step::Done;
  epoch_ += moved;
  return moved ? Step::Moved : Step::Blocked;
}

bool Comm::begin_write(int p) {
  std::atomic<uint64_t>& writing = segment()->writing(session.local_index(), peer(p).local);
  writing.store(1, std::memory_order_seq_cst);
  if (!peer(p).cell->closed.load(std::memory_order_seq_cst)) return true;
  writing.store(0, std::memory_order_release);
  return false;
}

void Comm::end_write(int p) {
  segment()->writing(session.local_index(), peer(p).local).store(0, std::memory_order_release);
}

void Comm::forbid_writes() {
  if (!cell() || cell()->closed.exchange(1)) return;
  Deadline deadline = after_ms(1000);  // a block takes microseconds, unless its writer is dead or stopped
  for (auto& p : session.peers())
    while (p->direct && segment()->writing(p->local, session.local_index()).load() && Clock::now() < deadline)
      sched_yield();
}

void Comm::finish(Batch& batch) {
  batch.done = true;
  ++epoch_;
  serving_.store(batch.ticket + 1, std::memory_order_release);
  bell().ring();
}

void Comm::ring_peers() {
  for (auto& p : session.peers()) {
    bool ring = false;
    for (Pipe& pipe : p->pipe) {
      ring = ring || pipe.wrote || pipe.consumed;
      pipe.wrote = pipe.consumed = false;
    }
    if (ring && p->cell) p->cell->bell.ring();
  }
}

Step Comm::fail_with(ncclResult_t code, const std::string& text, bool tell) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (error() != ncclSuccess) return Step::Failed;
    error_text_ = text;
    error_.store(code, std::memory_order_release);
  }
  fail(code, "rank %d of %d: %s", rank, nranks, text.c_str());
  changed.notify_all();
  bell().ring();
  if (tell) tell_error();
  return Step::Failed;
}

Step Comm::mismatch(const std::string& text) { return fail_with(ncclInvalidUsage, kMismatch + text); }

void Comm::tell_error() {
  ncclResult_t code = error();
  std::string text = error_text();
  std::vector<char> body(sizeof code + text.size());
  memcpy(body.data(), &code, sizeof code);
  memcpy(body.data() + sizeof code, text.data(), text.size());
  for (int q = 0; q < nranks; ++q) session.send(q, Ctl::Error, body.data(), body.size());
}

Step Comm::remote_failed(int p, RemoteResult result, const char* doing) {
  std::string who = "rank " + std::to_string(p) + " (" + peer(p).str() + ")";
  if (result == RemoteResult::Gone)
    return fail_with(ncclRemoteError,
                     who + " died while rank " + std::to_string(rank) + " read its buffer in " + doing);
  if (result == RemoteResult::Denied)
    return fail_with(ncclSystemError, "the kernel no longer lets rank " + std::to_string(rank) +
                                          " read the memory of " + who +
                                          "; PYNCCL_CPU_DIRECT=0 does without");
  return fail_with(ncclInvalidArgument, "a buffer that " + who + " or rank " + std::to_string(rank) +
                                            " passed to " + doing +
                                            " is not as large as its count says, or not accessible");
}

std::string Comm::error_text() {
  std::lock_guard<std::mutex> lock(mutex);
  return error_text_;
}

// ---- what the service's thread tells ----

void Comm::arrived(const Hello& hello, SocketPtr socket) { session.arrived(hello, std::move(socket)); }

void Comm::frame(int from, const CtlHeader& header, std::vector<char> body) {
  Peer& p = peer(from);
  if (header.kind == Ctl::Error && body.size() >= sizeof(ncclResult_t)) {
    ncclResult_t code;
    memcpy(&code, body.data(), sizeof code);
    bool same = code == ncclInvalidUsage || code == ncclTimeout || code == ncclInvalidArgument;
    std::string text(body.data() + sizeof code, body.size() - sizeof code);
    if (text.find(kReports) == std::string::npos) text = "rank " + std::to_string(from) + kReports + text;
    fail_with(same ? code : ncclRemoteError, text, false);
    return;
  }
  if (header.kind == Ctl::Exchange) return session.exchanged(from, header.tag, std::move(body));
  std::lock_guard<std::mutex> lock(mutex);
  if (header.kind == Ctl::Leaving && body.size() == sizeof p.leaving) {
    memcpy(&p.leaving, body.data(), sizeof p.leaving);
    p.left = true;
  } else if (header.kind == Ctl::Stuck && body.size() == sizeof(Stuck)) {
    if (!p.stuck) p.stuck = std::make_unique<Stuck>();
    memcpy(p.stuck.get(), body.data(), sizeof(Stuck));
    p.stuck->doing[sizeof p.stuck->doing - 1] = 0;
  }
  changed.notify_all();
}

void Comm::closed(int from) {
  Peer& p = peer(from);
  bool expected;
  {
    std::lock_guard<std::mutex> lock(mutex);
    p.gone = true;
    expected = p.left || session.stopped() || phase.load() == Phase::Creating;
  }
  if (!expected) died(from);
  changed.notify_all();
}

void Comm::died(int from) {
  fail_with(ncclRemoteError, "rank " + std::to_string(from) + " (" + peer(from).str() +
                                 ") died, or exited without destroying its communicator");
}

void Comm::open() {
  int dead = -1;
  {
    std::lock_guard<std::mutex> lock(mutex);
    phase.store(Phase::Ready);
    for (int q = 0; q < nranks; ++q)
      if (peer(q).gone && !peer(q).left) dead = q;
  }
  if (dead >= 0) died(dead);
  set_pending(ncclSuccess);
}

// ---- leaving ----

ncclResult_t Comm::announce_leaving() {
  if (session.left.exchange(true)) return ncclSuccess;
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank || !session.linked(q)) continue;
    Leaving mine{colls_issued.load(), p.sends_issued.load(), p.recvs_issued.load()};
    session.send(q, Ctl::Leaving, &mine, sizeof mine);
  }
  return ncclSuccess;
}

ncclResult_t Comm::await_leaving() {
  Deadline deadline = after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"));
  for (int q = 0; q < nranks; ++q) {
    if (q == rank) continue;
    Peer& p = peer(q);
    std::unique_lock<std::mutex> lock(mutex);
    bool came = changed.wait_until(lock, deadline, [&] { return p.left || error() != ncclSuccess; });
    if (error() != ncclSuccess) return error();
    if (!came)
      return lock.unlock(),
             fail(ncclTimeout, "ncclCommFinalize: rank %d waited in vain for rank %d to finalize", rank, q);
    uint64_t sent = p.sends_issued, got = p.recvs_issued;
    Leaving theirs = p.leaving;
    lock.unlock();
    std::string me = "rank " + std::to_string(rank), them = "rank " + std::to_string(q);
    if (sent != theirs.recvs)
      mismatch(me + " sent " + std::to_string(sent) + " messages to " + them + ", which received " +
               std::to_string(theirs.recvs) + " before ncclCommFinalize");
    else if (got != theirs.sends)
      mismatch(them + " sent " + std::to_string(theirs.sends) + " messages to " + me + ", which received " +
               std::to_string(got) + " before ncclCommFinalize");
    else if (colls_issued != theirs.colls)
      mismatch(me + " issued " + std::to_string(colls_issued) + " collectives, " + them + " " +
               std::to_string(theirs.colls) + " before ncclCommFinalize");
    if (error() != ncclSuccess) return error();
  }
  return ncclSuccess;
}

ncclResult_t Comm::drain(Deadline deadline) {
  for (;;) {
    uint32_t seen = bell().look();
    if (idle()) return ncclSuccess;
    if (Clock::now() > deadline) return ncclTimeout;
    bell().wait(seen, 20 * 1000 * 1000);
  }
}

}  // namespace pncpu
