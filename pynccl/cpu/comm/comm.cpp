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

std::string Peer::str() const { return "pid " + std::to_string(info.pid) + " on " + info.host_name; }

Comm::Comm(int device_)
    : device(device_), generation(process_generation()), serial(next_serial()), coll_(context_), p2p_(context_) {
  inline_bytes = size_t(std::max<int64_t>(0, param_int("PYNCCL_CPU_INLINE_BYTES")));
  block_bytes = align_up(size_t(std::max<int64_t>(4096, param_int("PYNCCL_CPU_BLOCK_BYTES"))), 4096);
  ring_bytes = 4096;
  while (ring_bytes < size_t(param_int("PYNCCL_CPU_RING_BYTES"))) ring_bytes *= 2;
  timeout_s = param_seconds("PYNCCL_CPU_TIMEOUT");
  direct_allowed_ = param_int("PYNCCL_CPU_DIRECT") != 0;
  blocking_calls = param_int("PYNCCL_CPU_BLOCKING") != 0;
}

Comm::~Comm() = default;

void Comm::set_shape(int rank_, int nranks_) {
  std::lock_guard<std::mutex> lock(mutex);
  rank = rank_;
  nranks = nranks_;
  peers_.clear();
  for (int i = 0; i < nranks; ++i) peers_.push_back(std::make_unique<Peer>());
}

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
  context_.ring_peers();
  if (batch.at == batch.colls.size() && p2p_.done()) return Step::Done;
  epoch_ += moved;
  return moved ? Step::Moved : Step::Blocked;
}

void Comm::forbid_writes() {
  if (!me_ || me_->closed.exchange(1)) return;
  Deadline deadline = after_ms(1000);  // a block takes microseconds, unless its writer is dead or stopped
  for (auto& p : peers_)
    while (p->link.direct() && p->link.theirs->writing.load() && Clock::now() < deadline) sched_yield();
}

void Comm::finish(Batch& batch) {
  batch.done = true;
  ++epoch_;
  serving_.store(batch.ticket + 1, std::memory_order_release);
  bell().ring();
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
  for (auto& p : peers_)
    if (SocketPtr control = p->control; control && !p->gone)
      control->send_frame(Ctl::Error, 0, body.data(), body.size());
}

std::string Comm::error_text() {
  std::lock_guard<std::mutex> lock(mutex);
  return error_text_;
}

// ---- what the service's thread tells ----

void Comm::arrived(const Hello& hello, SocketPtr socket) {
  std::lock_guard<std::mutex> lock(mutex);
  waiting_[{int(hello.kind), hello.rank}] = std::move(socket);
  changed.notify_all();
}

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
  std::lock_guard<std::mutex> lock(mutex);
  if (header.kind == Ctl::Leaving && body.size() == sizeof p.leaving) {
    memcpy(&p.leaving, body.data(), sizeof p.leaving);
    p.left = true;
  } else if (header.kind == Ctl::Exchange) {
    p.inbox[header.tag] = std::move(body);
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
    expected = p.left || aborted.load() || phase.load() == Phase::Creating;
  }
  if (!expected) died(from);
  changed.notify_all();
}

void Comm::died(int from) {
  fail_with(ncclRemoteError, "rank " + std::to_string(from) + " (" + peer(from).str() +
                                 ") died, or exited without destroying its communicator");
}

void Comm::open() {
  context_.rank = rank;
  context_.nranks = nranks;
  context_.inline_bytes = inline_bytes;
  context_.block_bytes = block_bytes;
  for (int q = 0; q < nranks; ++q) context_.links.push_back(q == rank ? nullptr : &peer(q).link);
  context_.fail = [this](ncclResult_t code, const std::string& text) { return fail_with(code, text); };
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
  if (left.exchange(true)) return ncclSuccess;
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank || !p.control) continue;
    Leaving mine{colls_issued.load(), p.sends_issued.load(), p.recvs_issued.load()};
    p.control->send_frame(Ctl::Leaving, 0, &mine, sizeof mine);
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

void Comm::stop_creation() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    aborted.store(true);
  }
  if (SocketPtr joining = std::atomic_load(&join_socket)) shutdown(joining->fd(), SHUT_RDWR);
  changed.notify_all();
}

void Comm::disconnect() {
  forget(self.token);
  for (auto& p : peers_) {
    unwatch(p->control);
    for (auto& pipe : p->link.pipe) {
      if (!pipe) continue;
      unwatch(pipe->socket());
      pipe->close();
    }
    p->control.reset();
  }
}

void Comm::drop_connections() {
  for (auto& p : peers_) {
    if (p->control) shutdown(p->control->fd(), SHUT_RDWR);
    for (auto& pipe : p->link.pipe)
      if (SocketPtr socket = pipe ? pipe->socket() : nullptr) shutdown(socket->fd(), SHUT_RDWR);
  }
  // Shared memory would serve on until the service sees the ends.
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait_until(lock, after_ms(1000), [&] { return nranks == 1 || error() != ncclSuccess; });
}

}  // namespace pncpu
