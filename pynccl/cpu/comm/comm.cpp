#include "comm/comm.hpp"

#include <sched.h>

#include <algorithm>
#include <iterator>
#include <numeric>

namespace pncpu {
namespace {

constexpr int kLookMs = 20;   // how often a wait looks for news in other communicators
constexpr int kNewsMs = 300;  // what news of a failure may take more than that of a departure

uint64_t next_serial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

std::string counted(uint64_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

Comm::Comm(int device_, std::shared_ptr<Domain> domain_)
    : session(*this, device_),
      device(device_),
      serial(next_serial()),
      domain(std::move(domain_)),
      registry(serial),
      coll_(context_),
      p2p_(context_),
      one_sided_(context_) {
  timeout_s = param_seconds("PYNCCL_CPU_TIMEOUT");
  blocking_calls = param_int("PYNCCL_CPU_BLOCKING") != 0;
}

Comm::~Comm() = default;

std::vector<uint64_t> Comm::claim_meeting(const std::vector<int>& ranks, bool after_failure) {
  called();
  std::lock_guard<std::mutex> lock(session.mutex);
  std::vector<uint64_t>& met = meetings_[after_failure];
  met.resize(size_t(nranks));
  std::vector<uint64_t> tags;
  for (int q : ranks) tags.push_back(++met[size_t(q)] | (after_failure ? kAfterFailure : 0));
  return tags;
}

void Comm::begin_child(const std::shared_ptr<Comm>& child) {
  std::lock_guard<std::mutex> lock(session.mutex);
  child->parent_ = weak_from_this();
  children_.push_back({child});
  if (session.stopped()) child->session.stop_creation();
}

std::vector<Comm::Derived>::iterator Comm::find_child(const Comm& child) {
  return std::find_if(children_.begin(), children_.end(), [&](auto& c) { return c.comm.get() == &child; });
}

bool Comm::is_dead(int q) { return peer(q).gone && !peer(q).left; }

LateRanks Comm::dead_ranks() {
  std::lock_guard<std::mutex> lock(session.mutex);
  LateRanks dead;
  for (int q = 0; q < nranks; ++q)
    if (q != rank && is_dead(q)) dead.add(q);
  return dead;
}

int Comm::missing_of(const Members& members) {
  auto at = std::find_if(members.begin(), members.end(),
                         [&](auto& member) { return is_dead(member.first) || absent_.count(member); });
  return at == members.end() ? -1 : at->first;
}

void Comm::end_missing() {
  for (auto& [child, members] : children_)
    // A member that has completed its part may end the parent at once.
    if (missing_of(members) >= 0) child->session.stop_connecting();
}

void Comm::connects(const Comm& child, const Members& members) {
  std::lock_guard<std::mutex> lock(session.mutex);
  if (auto at = find_child(child); at != children_.end()) at->members = members;
  end_missing();
}

ncclResult_t Comm::explain(ncclResult_t seen, const Members& members) {
  if (seen == ncclSuccess) return seen;
  int missing = -1;
  // What this communicator has heard is then the earlier failure.
  const bool after_failure = std::any_of(members.begin(), members.end(),
                                         [](auto& member) { return member.second >= kAfterFailure; });
  {
    std::unique_lock<std::mutex> lock(session.mutex);
    const auto knows = [&] {
      missing = missing_of(members);
      return missing >= 0 && (after_failure || heard_.failed());
    };
    // The derived communicator may notice the end of a connection first.
    if (seen == ncclRemoteError)
      session.changed.wait_for(lock, std::chrono::milliseconds(kNewsMs),
                               [&] { return knows() || comm_state.ending() != CommState::End::None; });
    if (!knows()) return seen;
  }
  if (!after_failure) return say(heard_.code(), heard_.text());
  return session.lost_meanwhile(missing);
}

void Comm::end_child(const Comm& child, ErrorCode code, std::string_view why,
                     const LateRanks& late) noexcept {
  derivation_.renew(code, why, late);
  std::lock_guard<std::mutex> lock(session.mutex);
  auto at = find_child(child);
  if (at != children_.end()) children_.erase(at);
}

void Comm::stop_children() {
  std::lock_guard<std::mutex> lock(session.mutex);
  for (auto& child : children_) child.comm->session.stop_creation();
}

ncclResult_t Comm::check_sound(const char* function, bool only_takes) {
  if (derivation_.failed()) derivation_.renew(ncclSuccess, {});
  if (only_takes ? !kept_error_.failed() : error() == ncclSuccess) return ncclSuccess;
  refused_.store(true);
  return fail_in(function, error_code(), "%s%s", kFailedEarlier, error_text().c_str());
}

void Comm::lend(const void* handle, const void* at, size_t size) {
  std::optional<Offer> offer = loans_.offer(handle, at, size);
  for (int q = 0; q < session.known_ranks() && offer; ++q)
    if (q != rank && maps_memory_of(q)) session.send(q, Ctl::Lend, &*offer, sizeof *offer);
}

void Comm::take_back(const void* handle) {
  std::optional<Loans::End> end = loans_.withdraw(handle);
  for (int q = 0; q < session.known_ranks() && end; ++q)
    if (q != rank && maps_memory_of(q))
      session.send(q, Ctl::Return, &end->call, sizeof end->call, end->number);
}

ncclResult_t Comm::check_accepts(const char* function, bool only_takes) {
  if (comm_state.ending() != CommState::End::None)
    return fail_in(function, ncclInvalidUsage, "comm %p was destroyed or aborted before the call was issued",
                   static_cast<void*>(handle));
  if (comm_state.revoked.load()) {
    derivation_.renew(ncclSuccess, {});
    return fail_in(function, ncclInvalidUsage, "comm has been revoked");
  }
  if (ncclResult_t r = check_sound(function, only_takes); r != ncclSuccess) return r;
  Phase phase = comm_state.phase.load(std::memory_order_relaxed);
  if (phase == Phase::Suspended) return fail_in(function, ncclInvalidUsage, "comm is suspended");
  if (phase != Phase::Ready) return fail_in(function, ncclInvalidUsage, "comm has been finalized");
  return ncclSuccess;
}

void Comm::count_waits(Op& op) {
  for (Awaited& wait : op.one_sided->waits)
    wait.until = peer(wait.peer).signals_awaited.fetch_add(wait.count) + wait.count;
}

void Comm::count_issue(Op& op) {
  if (is_collective(op.func)) {
    op.number = ++colls_issued;
    std::atomic<uint64_t>& issued = issued_by_func[size_t(op.func)];
    bool is_exchange = op.func == Func::AllGather && op.root != 0;  // of this library's own
    issued.store(issued.load(std::memory_order_relaxed) + !is_exchange, std::memory_order_relaxed);
  } else if (op.func == Func::WaitSignal)
    count_waits(op);
  else
    op.number = ++(op.func == Func::Send   ? peer(op.root).sends_issued
                   : op.func == Func::Recv ? peer(op.root).recvs_issued
                                           : peer(op.root).signals_issued);
}

void Comm::note_started(const Batch& batch) {
  if (!batch.colls.empty()) colls_started_.store(batch.colls.back().number);
  for (const Op& op : batch.p2p)
    (op.func == Func::Send ? peer(op.root).sends_started : peer(op.root).recvs_started).store(op.number);
  for (const Op& op : batch.one_sided)
    if (op.func != Func::WaitSignal) peer(op.root).signals_started.store(op.number);
}

Step Comm::progress(Batch& batch) {
  if (!turns.is_turn_of(batch.ticket)) return Step::Blocked;
  Step s = kept_error_.failed() ? Step::Failed : advance(batch);
  if (s == Step::Failed) close_buffers();
  return s;
}

Step Comm::advance(Batch& batch) {
  bool moved = !batch.started, heard = heard_.failed();
  if (!batch.started) {
    batch.started = true;
    note_started(batch);
    p2p_.start(batch.p2p);
    one_sided_.start(batch.one_sided);
    if (!batch.colls.empty()) coll_.start(batch.colls[0], ++coll_seq_);
  }
  while (batch.at < batch.colls.size()) {
    Step s = coll_.step();
    if (s == Step::Failed) return s;
    moved = moved || s != Step::Blocked;
    if (s != Step::Done) break;
    if (++batch.at < batch.colls.size()) coll_.start(batch.colls[batch.at], ++coll_seq_);
  }
  if (!p2p_.done()) {
    Step s = p2p_.step();
    if (s == Step::Failed) return s;
    moved = moved || s != Step::Blocked;
  }
  if (!one_sided_.done()) {
    Step s = one_sided_.step();
    if (s == Step::Failed) return s;
    moved = moved || s != Step::Blocked;
  }
  context_.ring_peers();
  if (batch.at == batch.colls.size() && p2p_.done() && one_sided_.done()) return Step::Done;
  if (moved) return Step::Moved;
  if (!heard || more_may_come()) return Step::Blocked;
  decide(heard_.code(), heard_.text());
  return Step::Failed;
}

// Data that a peer on another host sent before its death may still arrive.
bool Comm::more_may_come() {
  if (heard_long_ago()) return false;
  for (auto& p : session.peers())
    for (auto& pipe : p->link.pipe)
      if (p->gone && pipe && pipe->more_may_come()) return true;
  return false;
}

// Tells the peers before any thread of this process wakes and may exit: every peer then hears the cause
// before this rank's connection ends.
void Comm::hear_of(ErrorCode code, std::string_view text) noexcept {
  if (error() == ncclSuccess && !heard_.failed()) tell(code, text);
  heard_at_.store(Clock::now());
  if (heard_.decide(code, text) && turns.idle()) say(code, text);
  wake();
}

void Comm::close_buffers() {
  {
    std::lock_guard<std::mutex> lock(puts_mutex_);
    puts_closed_ = true;
  }
  if (!cell() || cell()->closed.exchange(1)) return;
  Deadline deadline = after_ms(1000);  // using a block takes microseconds, unless the peer is dead or stopped
  for (auto& p : session.peers()) {
    if (!p->link.theirs) continue;  // on another host
    Deadline until = p->same_process ? kForever : deadline;
    while (p->link.theirs->inside.load() && Clock::now() < until) sched_yield();
  }
}

void Comm::finish(Batch& batch) {
  batch.done = true;
  turns.end(batch.ticket);
  ring();
  if (heard_.failed()) session.notify();
}

ncclResult_t Comm::say(ErrorCode code, std::string_view text) const noexcept {
  return fail_at(rank, nranks, code, "%.*s", int(text.size()), text.data());
}

bool Comm::decide(ErrorCode code, std::string_view text) noexcept {
  if (!kept_error_.decide(code, text)) return false;
  say(code, text);
  wake();
  return true;
}

bool Comm::stop_calls(std::string_view why) noexcept {
  if (!heard_.failed()) return decide(ncclInvalidUsage, why);
  try {
    decide(heard_.code(), heard_.text());
  } catch (const std::bad_alloc&) {
    decide(heard_.code(), "out of memory");
  }
  return false;
}

void Comm::wake() noexcept {
  session.notify();
  ring();
}

void Comm::sleep(uint32_t seen, int64_t ns) {
  if (DataWatch* data = session.data_alone()) return data->sleep(ns, [&] { return bell().look() != seen; });
  session.wake_on_data();
  bell().wait(seen, ns);
}

Step Comm::fail_with(ErrorCode code, std::string_view text, bool tells) noexcept {
  if (decide(code, text) && tells) tell(code, text);
  return Step::Failed;
}

void Comm::give_up(ErrorCode code, std::string_view text, const LateRanks& late) noexcept {
  if (!kept_error_.decide(code, text, late)) return;
  wake();
  tell(code, text);
}

Step Comm::mismatch(const std::string& text) { return fail_with(kMismatch, kMismatchText + text); }

ncclResult_t Comm::disagree(uint64_t tag, const std::string& text) {
  std::string whole = kMismatchText + text;
  fail_with(kMismatch, whole);
  if (disagreements_[tag / kAfterFailure].decide(kMismatch, whole)) {
    std::string body = whole.substr(0, kMaxText);
    for (int q = 0; q < nranks; ++q)
      if (q != rank) session.send(q, Ctl::Disagree, body.data(), body.size(), tag & kAfterFailure);
  }
  return say_broken(tag);
}

void Comm::heard_disagreement(int from, uint64_t tag, const Blob& body) {
  std::string text = "rank " + std::to_string(from) + " reports: " + std::string(body.data, body.size);
  if (!disagreements_[tag / kAfterFailure].decide({ncclInvalidUsage, Mismatch::Calls, true}, text)) return;
  hear_of({ncclInvalidUsage, Mismatch::Calls, true}, text);
}

ncclResult_t Comm::say_broken(uint64_t tag) {
  const KeptError& why = disagreement(tag);
  return why.failed() ? say(why.code(), why.text()) : say(error_code(), error_text());
}

// The calls after a failure are the newest.
ErrorReport Comm::report() {
  if (error() != ncclSuccess)
    reported_.store(true);
  else if (derivation_.failed())
    // This communicator is sound, and the thread's last error has the text. A later failure is another one.
    derivation_.renew(ncclSuccess, {});
  const std::string place = place_of(rank, nranks);
  auto placed = [&](ErrorCode code) {
    code.function = 0;
    code.place = uint8_t(place.size());
    return code;
  };
  for (const KeptError* kept_error : {&disagreements_[1], &disagreements_[0]})
    if (kept_error->failed()) return {placed(kept_error->code()), place + kept_error->text(), {}};
  // Its text has the rank in the derived communicator.
  if (derivation_.failed() && error() != ncclSuccess) {
    ErrorCode code = derivation_.code();
    code.place = 0;
    return {code, derivation_.text(), derivation_.late()};
  }
  ErrorCode code = error_code();
  const bool refused = refused_.load();
  code.reported = code.reported && !refused;
  return {placed(code), place + (refused ? kFailedEarlier : "") + error_text(), kept_error_.late()};
}

// Without memory a peer only sees the end of the connection.
void Comm::tell(ErrorCode code, std::string_view text) noexcept {
  const ErrorHead head{int32_t(code.result), uint8_t(code.mismatch), code.reported};
  char body[sizeof head + kMaxText];
  text = text.substr(0, kMaxText);
  memcpy(body, &head, sizeof head);
  memcpy(body + sizeof head, text.data(), text.size());
  const size_t bytes = sizeof head + text.size();
  try {
    std::vector<int> all(size_t(session.known_ranks()));
    std::iota(all.begin(), all.end(), 0);
    return session.send(all, Ctl::Error, body, bytes);
  } catch (const std::bad_alloc&) {
  }
  for (int q = 0, known = session.known_ranks(); q < known; ++q) try {
      session.send(q, Ctl::Error, body, bytes);
    } catch (const std::bad_alloc&) {
    }
}

// ---- called by the service's thread ----

void Comm::arrived(const Hello& hello, SocketPtr socket) { session.arrived(hello, std::move(socket)); }

void Comm::frame(int from, const CtlHeader& header, const Blob& body) {
  Peer& p = peer(from);
  if (header.kind == Ctl::Error) return error_told(from, body);
  if (header.kind == Ctl::Disagree) return heard_disagreement(from, header.tag, body);
  if (header.kind == Ctl::Probe) return per_process<Deadlocks>().probed(*this, from, body);
  if (header.kind == Ctl::Verdict) return per_process<Deadlocks>().cycle_found(*this, body);
  if (header.kind == Ctl::Exchange) return session.exchanged(from, header.tag, body);
  if (header.kind == Ctl::Put) return put_arrived(from, body);
  if (header.kind == Ctl::Dial) return session.asked_to_dial(from, header.tag);
  if (lent(from, header, body)) return;
  std::lock_guard<std::mutex> lock(session.mutex);
  echoed_ = echoed_ || (header.kind == Ctl::Leaving && from == rank);
  if (header.kind == Ctl::Absent) {
    absent_.insert({from, header.tag});
    end_missing();
  }
  if (header.kind == Ctl::Leaving && body.size == sizeof p.leaving) {
    memcpy(&p.leaving, body.data, sizeof p.leaving);
    p.left = true;
  }
  session.changed.notify_all();
}

void Comm::put_arrived(int from, const Blob& body) {
  PutHead head;
  if (body.size < sizeof head) return;
  memcpy(static_cast<void*>(&head), body.data, sizeof head);
  if (head.puts) {
    std::lock_guard<std::mutex> lock(puts_mutex_);
    if (puts_closed_) return;  // the caller may have freed the memory
    std::shared_ptr<Window> window = registry.window_numbered(head.window);
    const size_t bytes = body.size - sizeof head;
    if (!window || head.offset > window->size || bytes > window->size - head.offset) {
      fail_with(ncclInvalidUsage, "rank " + std::to_string(from) + " put " + std::to_string(bytes) +
                                      " bytes into a window that rank " + std::to_string(rank) +
                                      (window ? " registered with fewer" : " has deregistered"));
      return;
    }
    memcpy(window->buffer + head.offset, body.data + sizeof head, bytes);
  }
  if (head.signals && head.signal < uint32_t(session.contexts * session.signals))
    one_sided_.arrived(from, head.signal);
  ring();
}

// Whether this process and a peer's map each other's memory; ranks of one process need no mappings.
bool Comm::maps_memory_of(int q) { return peer(q).local >= 0 && peer(q).vouched && !peer(q).same_process; }

bool Comm::lent(int from, const CtlHeader& header, const Blob& body) {
  Offer offer;
  Loans::End end{header.tag, 0};
  if (header.kind == Ctl::Taken) loans_.taken(from, header.tag);
  if (header.kind == Ctl::Return && body.size == sizeof end.call) {
    memcpy(&end.call, body.data, sizeof end.call);
    loans_.give_back(from, end);
  }
  if (header.kind == Ctl::Lend && body.size == sizeof offer && maps_memory_of(from)) {
    memcpy(static_cast<void*>(&offer), body.data, sizeof offer);
    if (loans_.borrow(from, peer(from).info.pid, offer))
      session.send(from, Ctl::Taken, nullptr, 0, offer.number);
  }
  return header.kind == Ctl::Lend || header.kind == Ctl::Taken || header.kind == Ctl::Return;
}

// A report that is passed on keeps the name of its first author.
void Comm::error_told(int from, const Blob& body) {
  ErrorHead head;
  if (body.size < sizeof head) return;
  memcpy(&head, body.data, sizeof head);
  bool same =
      head.result == ncclInvalidUsage || head.result == ncclTimeout || head.result == ncclInvalidArgument;
  peer(from).failed.store(true);
  std::string text(body.data + sizeof head, body.size - sizeof head);
  if (!head.reported) text = "rank " + std::to_string(from) + " reports: " + text;
  hear_of({same ? ncclResult_t(head.result) : ncclRemoteError,
           Mismatch(std::min(head.mismatch, uint8_t(Mismatch::Departed))), true},
          text);
}

void Comm::closed(int from) {
  Peer& p = peer(from);
  bool expected;
  {
    std::lock_guard<std::mutex> lock(session.mutex);
    expected = p.left || session.stopped() || comm_state.phase.load() == Phase::Creating;
    p.gone = expected;
  }
  if (!expected) {
    // A thread that sees that the peer is gone may abort at once, and the others must hear of the death
    // first.
    died(from);
    std::lock_guard<std::mutex> lock(session.mutex);
    p.gone = true;
    end_missing();
  }
  session.changed.notify_all();
}

void Comm::tell_error() noexcept {
  try {
    tell(error_code(), error_text());
  } catch (const std::bad_alloc&) {
    tell(error(), "out of memory");
  }
}

void Comm::died(int from) noexcept {
  char text[256];
  const PeerInfo& info = peer(from).info;
  snprintf(text, sizeof text, "rank %d (pid %lld on %s) died, or exited without destroying its communicator",
           from, static_cast<long long>(info.pid), info.host_name);
  hear_of(ncclRemoteError, text);
}

void Comm::describe(std::vector<char>* out) {
  constexpr Func kOrder[] = {Func::Broadcast, Func::Reduce,   Func::AllGather, Func::ReduceScatter,
                             Func::AllReduce, Func::AlltoAll, Func::Gather,    Func::Scatter};
  static_assert(std::size(kOrder) == kCountedKinds && kCountedKinds == size_t(Func::Send));
  RankState state;
  state.async_error = error();
  Phase phase = comm_state.phase.load();
  if (phase == Phase::Creating) state.init_state = ncclInProgress;
  state.finalized = phase == Phase::Finalizing || phase == Phase::Finalized;
  state.destroyed = comm_state.ending() == CommState::End::Destroy;
  state.aborted = comm_state.ending() == CommState::End::Abort;
  for (size_t i = 0; i < kCountedKinds; ++i)
    state.counts[i] = issued_by_func[size_t(kOrder[i])].load(std::memory_order_relaxed);
  session.describe(state, out);
}

void Comm::expect_signals() { one_sided_.open(nranks, session.contexts * session.signals); }

void Comm::open() {
  context_.rank = rank;
  context_.nranks = nranks;
  context_.inline_bytes = session.inline_bytes;
  context_.shown_bytes = session.shown_bytes;
  context_.board_bytes = session.board_bytes;
  context_.staged = session.staged;
  context_.block_bytes = session.block_bytes;
  context_.cell = session.cell();
  if (segment()) context_.board = segment()->board(session.local_index());
  std::vector<uint64_t> hosts;
  for (int q = 0; q < nranks; ++q) {
    context_.links.push_back(q == rank ? nullptr : &peer(q).link);
    hosts.push_back(peer(q).info.host);
  }
  context_.hear_pipes();
  context_.layout = Layout(hosts);
  context_.layout.by_hosts = session.by_hosts;
  context_.fail = [this](ErrorCode code, const std::string& text) { return fail_with(code, text); };
  context_.has_room = [this](int to) { return session.has_room(to); };
  context_.windows = [this] { return registry.shared_windows(); };
  context_.registered = [this](uint64_t call) { return loans_.now(call); };
  context_.finished = [this](uint64_t call) { loans_.finished(call); };
  context_.post = [this](int to, const PutHead& head, const char* data, size_t bytes) {
    std::vector<char> body(sizeof head + bytes);
    memcpy(body.data(), &head, sizeof head);
    if (bytes) memcpy(body.data() + sizeof head, data, bytes);
    session.send(to, Ctl::Put, body.data(), body.size());
  };
  int dead = -1;
  {
    std::lock_guard<std::mutex> lock(session.mutex);
    comm_state.phase.store(Phase::Ready);
    for (int q = 0; q < nranks; ++q)
      if (is_dead(q)) dead = q;
  }
  if (dead >= 0) died(dead);
  comm_state.set_pending(ncclSuccess);
}

// ---- leaving ----

// The collectives that the program has issued, without this library's own exchanges.
static uint64_t colls_of_program(const Comm& comm) {
  uint64_t sum = 0;
  for (auto& issued : comm.issued_by_func) sum += issued.load(std::memory_order_relaxed);
  return sum;
}

ncclResult_t Comm::announce_leaving() {
  if (session.left.exchange(true)) return ncclSuccess;
  std::map<std::string, std::vector<int>> alike;
  for (int q = 0, known = session.known_ranks(); q < known; ++q) {
    Peer& p = peer(q);
    if (q == rank || !session.linked(q)) continue;
    const Leaving mine{colls_of_program(*this), p.sends_issued.load(), p.recvs_issued.load(),
                       p.signals_issued.load(), p.signals_awaited.load()};
    alike[std::string(reinterpret_cast<const char*>(&mine), sizeof mine)].push_back(q);
  }
  for (auto& [mine, ranks] : alike) session.send(ranks, Ctl::Leaving, mine.data(), mine.size());
  if (shares_process(rank)) session.echo(Ctl::Leaving, nullptr, 0);
  return ncclSuccess;
}

bool Comm::shares_process(int q) { return q < session.known_ranks() && peer(q).shares_process; }

// Of two ranks of this process that leave concurrently at least one has the other's frame when its own echo
// has arrived. So one of them compares.
void Comm::await_echo(Deadline deadline) {
  if (!shares_process(rank)) return;
  std::unique_lock<std::mutex> lock(session.mutex);
  session.changed.wait_until(lock, deadline, [&] { return echoed_ || error() != ncclSuccess; });
}

// One thread may finalize the ranks of its process one after another. So nobody waits for them, and they wait
// for nobody.
bool Comm::has_to_await(int q) { return q != rank && !shares_process(rank) && !shares_process(q); }

bool Comm::awaits_leaving(int q) {
  if (!finalizes_.load() || comm_state.phase.load() != Phase::Finalizing || !has_to_await(q)) return false;
  std::lock_guard<std::mutex> lock(session.mutex);
  return !peer(q).left;
}

ncclResult_t Comm::await_leaving() {
  Deadline deadline = after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"));
  await_echo(deadline);
  finalizes_.store(true);
  for (int q = 0; q < nranks; ++q) {
    if (q == rank) continue;
    Peer& p = peer(q);
    // Of ranks that share a process the last one compares with all.
    bool waits = has_to_await(q);
    std::unique_lock<std::mutex> lock(session.mutex);
    if (!p.left && !waits) continue;
    bool came = session.changed.wait_until(lock, deadline, [&] { return p.left || error() != ncclSuccess; });
    if (error() != ncclSuccess) return error();
    if (!came)
      return lock.unlock(), fail_in("ncclCommFinalize", ncclTimeout,
                                    "rank %d timed out waiting for rank %d to finalize", rank, q);
    uint64_t sent = p.sends_issued, got = p.recvs_issued, signalled = p.signals_issued,
             awaited = p.signals_awaited;
    Leaving theirs = p.leaving;
    lock.unlock();
    std::string me = "rank " + std::to_string(rank), them = "rank " + std::to_string(q);
    if (sent != theirs.recvs)
      mismatch(me + " sent " + counted(sent, "message") + " to " + them + ", which received " +
               std::to_string(theirs.recvs) + " before ncclCommFinalize");
    else if (got != theirs.sends)
      mismatch(them + " sent " + counted(theirs.sends, "message") + " to " + me + ", which received " +
               std::to_string(got) + " before ncclCommFinalize");
    else if (signalled != theirs.awaited)
      mismatch(me + " sent " + counted(signalled, "signal") + " to " + them + ", which waited for " +
               std::to_string(theirs.awaited) + " before ncclCommFinalize");
    else if (awaited != theirs.signals)
      mismatch(them + " sent " + counted(theirs.signals, "signal") + " to " + me + ", which waited for " +
               std::to_string(awaited) + " before ncclCommFinalize");
    else if (uint64_t colls = colls_of_program(*this); colls != theirs.colls)
      mismatch(me + " issued " + counted(colls, "collective") + " before ncclCommFinalize, " + them + " " +
               std::to_string(theirs.colls));
    if (error() != ncclSuccess) return error();
  }
  return ncclSuccess;
}

std::string Comm::doing(const Batch& batch) {
  return batch.at < batch.colls.size() ? coll_.str() : !p2p_.done() ? p2p_.str() : one_sided_.str();
}

std::string Comm::waiting_for(const Batch& batch) {
  bool coll = batch.at < batch.colls.size();
  std::string text = "rank " + std::to_string(rank) + " waits in " + doing(batch);
  std::vector<int> missing = coll ? coll_.missing() : std::vector<int>();
  for (size_t i = 0; i < missing.size(); ++i)
    text += (i ? ", " : missing.size() > 1 ? " for ranks " : " for rank ") + std::to_string(missing[i]);
  return text;
}

std::shared_ptr<Comm> Comm::that_heard() {
  std::shared_ptr<Comm> comm = shared_from_this();
  while (comm && !comm->heard_.failed()) comm = comm->parent_.lock();
  return comm;
}

// A rank that has left may have done so because of a failure of which this rank has heard, or hears soon: the
// news comes over another connection.
void Comm::never_ends(int q, const std::string& doing) {
  const Deadline deadline = after_ms(kNewsMs);
  std::shared_ptr<Comm> informed;
  while (!(informed = that_heard()) && !kept_error_.failed() && !session.stopped() &&
         Clock::now() < deadline) {
    std::unique_lock<std::mutex> lock(session.mutex);
    session.changed.wait_until(lock, std::min(deadline, after_ms(kLookMs)));
  }
  if (informed.get() == this) return void(decide(heard_.code(), heard_.text()));
  const std::string them = "rank " + std::to_string(q);
  if (informed)
    return void(
        fail_with(informed->heard_.code(),
                  them + " has left after a failure of the communicator that this one is derived from: " +
                      informed->heard_.text()));
  fail_with(kDeparted,
            kMismatchText + ("rank " + std::to_string(rank) + " waits in " + doing + " for " + them +
                             ", which has finalized, destroyed or dropped its communicator, or ended its "
                             "program, without a matching call"));
}

bool Comm::has_left(int q) {
  std::lock_guard<std::mutex> lock(session.mutex);
  return peer(q).left;
}

Wait Comm::waits_of(const Batch& batch) {
  Wait wait;
  wait.comm = shared_from_this();
  wait.has_turn = turns.is_turn_of(batch.ticket);
  if (!wait.has_turn || !batch.started) return wait;
  bool coll = batch.at < batch.colls.size();
  const std::string doing = this->doing(batch);
  wait.doing = "rank " + std::to_string(rank) + " waits in " + doing;
  if (coll)
    for (int q : coll_.missing()) wait.needs.push_back({q, Need::Collective, coll_.seq()});
  for (int q = 0; q < nranks && !p2p_.done(); ++q) {
    if (q == rank) continue;
    if (uint64_t n = p2p_.front_send(q).number) wait.needs.push_back({q, Need::Receive, n});
    if (uint64_t n = p2p_.front_recv(q).number) wait.needs.push_back({q, Need::Send, n});
  }
  if (!one_sided_.done())
    for (const Awaited& a : one_sided_.awaited())
      if (a.peer != rank) wait.needs.push_back({a.peer, Need::Signal, a.until});
  for (int q : one_sided_.targets())
    if (q != rank && has_left(q)) never_ends(q, doing);
  for (const Need& need : wait.needs) {
    std::unique_lock<std::mutex> lock(session.mutex);
    const Leaving& last = peer(need.peer).leaving;
    uint64_t made = need.kind == Need::Collective ? last.colls
                    : need.kind == Need::Send     ? last.sends
                    : need.kind == Need::Signal   ? last.signals
                                                  : last.recvs;
    if (!peer(need.peer).left || need.number <= made) continue;
    lock.unlock();
    never_ends(need.peer, doing);
    break;
  }
  return wait;
}

void Comm::meets(const void* exchange, const std::map<int, uint64_t>& missing, const std::string& doing,
                 double seconds) {
  if (comm_state.phase.load() == Phase::Creating) return;
  Wait wait{shared_from_this(), true, {}, "rank " + std::to_string(rank) + " waits in " + doing};
  for (auto& [q, tag] : missing)
    if (tag < kAfterFailure) wait.needs.push_back({q, Need::Meeting, tag});
  per_process<Deadlocks>().meets(exchange, std::move(wait), seconds);
}

void Comm::met(const void* exchange) { per_process<Deadlocks>().moved(exchange); }

void Comm::progress_towards(int from, Need::Kind kind, uint64_t* started, uint64_t* issued) {
  if (kind == Need::Meeting) {
    std::lock_guard<std::mutex> lock(session.mutex);
    *started = *issued = meetings_[0].empty() ? 0 : meetings_[0][size_t(from)];
    return;
  }
  Peer& p = peer(from);
  *started = kind == Need::Collective ? colls_started_
             : kind == Need::Send     ? p.sends_started
             : kind == Need::Signal   ? p.signals_started
                                      : p.recvs_started;
  *issued = kind == Need::Collective ? colls_issued
            : kind == Need::Send     ? p.sends_issued
            : kind == Need::Signal   ? p.signals_issued
                                     : p.recvs_issued;
}

std::shared_ptr<Stream> Comm::stream_of_all_pending() {
  std::lock_guard<std::mutex> lock(session.mutex);
  return turns.serving() >= newest_since_ ? newest_owner_.lock() : nullptr;
}

namespace {
// Some communicator has been called by another thread than the one that created it.
std::atomic<bool> g_handed_over{false};
constexpr int kNobody = 0, kSeveral = -1;  // values of calling_thread_
}  // namespace

int Comm::calling_thread() const {
  const int thread = calling_thread_.load(std::memory_order_relaxed);
  if (thread == kSeveral) return 0;
  return thread == kNobody && !g_handed_over.load(std::memory_order_relaxed) ? creator_ : thread;
}

void Comm::called() noexcept {
  const int thread = this_caller().thread;
  int before = calling_thread_.load(std::memory_order_relaxed);
  if (before == thread) return;
  if (thread != creator_) g_handed_over.store(true, std::memory_order_relaxed);
  if (before != kNobody || !calling_thread_.compare_exchange_strong(before, thread))
    calling_thread_.store(kSeveral);
}

void Comm::issued_on(const std::shared_ptr<Stream>& stream) {
  called();
  if (newest_.load(std::memory_order_relaxed) == stream.get()) return;
  std::lock_guard<std::mutex> lock(session.mutex);
  newest_owner_ = stream;
  newest_since_ = turns.next();
  newest_.store(stream.get(), std::memory_order_relaxed);
}

ncclResult_t Comm::drain(Deadline deadline) {
  for (;;) {
    uint32_t seen = bell().look();
    if (turns.idle()) return ncclSuccess;
    if (Clock::now() > deadline) return ncclTimeout;
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard<std::mutex> lock(session.mutex);
      stream = newest_owner_.lock();
    }
    Deadline soon = std::min(deadline, after_ms(20));
    if (stream && !stream->idle())
      stream->drive(stream->enqueued(), soon);
    else
      bell().wait(seen, until(soon, kSliceNs));
  }
}

}  // namespace pncpu
