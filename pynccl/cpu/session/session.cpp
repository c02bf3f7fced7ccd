#include "session/session.hpp"

#include <sched.h>

#include <cmath>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "base/device.hpp"
#include "base/fork.hpp"
#include "ops/collectives.hpp"
#include "ras/server.hpp"
#include "service/dial.hpp"

namespace pncpu {
namespace {

constexpr auto kLook =
    std::chrono::milliseconds(50);                // how often a wait polls for changes without a notification
constexpr auto kCheck = std::chrono::seconds(1);  // how often a creation looks whether a process lives
constexpr auto kRetry = std::chrono::milliseconds(20);
constexpr int kMostCalls = 3;
constexpr char kConnecting[] = "cannot connect to", kSharing[] = "cannot share memory with",
               kGettingSegment[] = "cannot get the shared memory of";
constexpr auto kAcceptance = std::chrono::seconds(1);  // how soon a data connection is accepted
constexpr auto kSearch = std::chrono::seconds(1);      // how often an exchange looks for a deadlock

// Two ranks pass more than their cores' own caches hold through the cache that the cores share. With more
// ranks several rings are in use at once.
constexpr size_t coll_factor(int ranks) { return ranks == 2 ? 8 : ranks <= 8 ? 2 : 1; }

// Settings that must be equal on all ranks. A byte for each rank follows: this rank can access its memory.
struct Settings {
  uint64_t inline_bytes, shown_bytes, board_bytes, block_bytes;
  int32_t contexts, signals, by_hosts;
};

// The segments of this process, by the token of the rank that maps them for the others.
struct Offers {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Token, std::shared_ptr<Segment>> segments;
};

thread_local double most_seconds = HUGE_VAL;

}  // namespace

std::string Peer::str() const { return "pid " + std::to_string(info.pid) + " on " + info.host_name; }

void limit_creations(double seconds) { most_seconds = seconds; }

double creation_limit() { return std::min(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"), most_seconds); }

Session::Session(Owner& owner, int device)
    : owner_(owner), device_(device), direct_allowed_(param_int("PYNCCL_CPU_DIRECT") != 0) {
  inline_bytes = size_t(std::max<int64_t>(0, param_int("PYNCCL_CPU_INLINE_BYTES")));
  shown_bytes = size_t(std::max<int64_t>(0, param_int("PYNCCL_CPU_SHOWN_BYTES")));
  board_bytes = SIZE_MAX;
  block_bytes = align_up(size_t(std::max<int64_t>(4096, param_int("PYNCCL_CPU_BLOCK_BYTES"))), 4096);
  by_hosts = param_int("PYNCCL_CPU_BY_HOSTS") != 0;
  seconds = creation_limit();
  ring_bytes = 4096;
  while (ring_bytes < size_t(param_int("PYNCCL_CPU_RING_BYTES"))) ring_bytes *= 2;
}

void Session::set_shape(int rank_, int nranks_) {
  std::lock_guard<std::mutex> lock(mutex);
  rank = rank_;
  nranks = nranks_;
}

ncclResult_t Session::introduce() {
  if (ncclResult_t r = describe_self(&self); r != ncclSuccess) return r;
  Token secret = Token::random();
  nonce_[0] = self.nonce[0] = secret.a;
  nonce_[1] = self.nonce[1] = secret.b;
  self.nonce_addr = reinterpret_cast<uintptr_t>(nonce_);
  self.device = device_;
  self.shared_devices = shared_devices();
  expect(self.token, owner_.sink());
  if (direct_allowed_) let_ranks_read();
  serve_ras();
  return ncclSuccess;
}

ncclResult_t Session::join(std::vector<Id> ids, uint64_t ids_hash, Table* table) {
  if (nranks > kMostRanks)
    return fail(ncclSystemError,
                "a communicator of %d ranks is more than the %d for which a rank keeps what it knows of each",
                nranks, kMostRanks);
  if (ids[0].from_env()) {  // NCCL_COMM_ID makes all ids one
    ids.resize(1);
    ids_hash = 0;
    if (rank == 0)
      if (ncclResult_t r = open_env_root(ids[0]); r != ncclSuccess) return r;
  }
  if (ncclResult_t r = introduce(); r != ncclSuccess) return r;
  Announce mine = announce();
  mine.ids_hash = ids_hash;
  mine.nids = int(ids.size());
  return pncpu::join(ids, mine, self, stop_, table);
}

Announce Session::announce() const {
  Announce mine;
  mine.rank = rank;
  mine.nranks = nranks;
  mine.pid = self.pid;
  mine.seconds = seconds;
  memcpy(mine.host_name, self.host_name, sizeof mine.host_name);
  return mine;
}

void Session::refuse(const Id& id) {
  if (!id.plausible() || id.from_env()) return;
  const ErrorCode code = last_error_code();
  std::string why = last_error();
  if (!code.reported)
    why = "rank " + std::to_string(rank) + " reports: " + why.substr(size_t(code.function) + code.place);
  end_id(id, announce(), {code.result, why, late_ranks()}, stop_);
}

void Session::stop() {
  stop_.set();
  notify();
  if (DataLinks* links = data_links()) links->stop();
}

void Session::stop_creation() {
  std::lock_guard<std::mutex> lock(mutex);
  if (complete_) return;
  stop_.set();
  changed.notify_all();
}

void Session::stop_connecting() {
  std::lock_guard<std::mutex> lock(mutex);
  if (all_linked_ || complete_) return;
  stop_.set();
  changed.notify_all();
}

bool Session::complete() {
  std::lock_guard<std::mutex> lock(mutex);
  return complete_ = !stopped();
}

ncclResult_t Session::connect(const Table& table) {
  if (ncclResult_t r = begin(table); r != ncclSuccess) return r;
  return finish();
}

ncclResult_t Session::begin(const Table& table) {
  deadline_ = after_seconds(seconds);
  table_ = table;
  if (!(table_[rank].token == self.token))
    return fail_at(rank, nranks, ncclInternalError, "the root's table has another process for this rank");
  if (ncclResult_t r = read_table(); r != ncclSuccess) return r;
  choose_wait_policy();
  if (nranks == 1) return ncclSuccess;
  if (ncclResult_t r = open_links(); r != ncclSuccess) return r;
  if (ncclResult_t r = share_segment(); r != ncclSuccess) return r;
  if (ncclResult_t r = attach_pipes(); r != ncclSuccess) return r;
  {
    std::lock_guard<std::mutex> lock(mutex);
    all_arrived_ = true;
    waiting_.clear();
  }
  attach(self.token);
  say_settings();
  return say(Tags(size_t(nranks)), everyone(), settings_, "setting up");
}

std::vector<int> Session::everyone() const {
  std::vector<int> ranks(static_cast<size_t>(nranks));
  for (int q = 0; q < nranks; ++q) ranks[size_t(q)] = q;
  return ranks;
}

// ---- the table of ranks ----

ncclResult_t Session::read_table() {
  std::vector<std::unique_ptr<Peer>> peers;
  std::set<uint64_t> host_ids;
  local_count_ = 0;
  lsa_size_ = 0;
  for (int q = 0, on_one_host = 1; q < nranks; ++q, ++on_one_host) {
    peers.push_back(std::make_unique<Peer>(table_[q]));
    Peer& p = *peers.back();
    host_ids.insert(p.info.host);
    if (q + 1 == nranks || table_[q + 1].host != p.info.host)
      lsa_size_ = std::gcd(lsa_size_, std::exchange(on_one_host, 0));
    hash = hash * 0x100000001b3 ^ p.info.token.a;
    if (p.info.version != NCCL_VERSION_CODE)
      return fail(ncclInvalidUsage, "rank %d uses version %d of this library, rank %d version %d", rank,
                  NCCL_VERSION_CODE, q, p.info.version);
    if (p.info.host != self.host) continue;
    if (q == rank) local_ = local_count_;
    p.local = local_count_++;
  }
  hosts_ = int(host_ids.size());
  std::map<Token, int> ranks_of;
  for (auto& p : peers) ++ranks_of[p->info.process];
  for (auto& p : peers) p->shares_process = ranks_of[p->info.process] > 1;
  if (local_count_ > kMostLocalRanks)
    return fail(ncclSystemError,
                "%d ranks of a communicator on this host are more than the %d for which there is memory: it "
                "grows with their square",
                local_count_, kMostLocalRanks);
  if (ncclResult_t r = check_devices(); r != ncclSuccess) return r;
  std::lock_guard<std::mutex> lock(mutex);
  peers_ = std::move(peers);
  return ncclSuccess;
}

// On every rank, also on those that share nothing, as in NCCL (src/init.cc: initTransportsRank).
ncclResult_t Session::check_devices() {
  if (sharing_allowed()) return ncclSuccess;
  std::map<std::pair<uint64_t, int>, int> owners;
  for (int q = 0; q < nranks; ++q) {
    const PeerInfo& info = table_[q];
    if (!info.shared_devices) continue;
    int owner = owners.emplace(std::make_pair(info.host, info.device), q).first->second;
    if (owner != q)
      return fail(ncclInvalidUsage,
                  "Duplicate GPU detected: rank %d and rank %d are both on device %d of %s. Choose other "
                  "devices, or set NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank to share one",
                  owner, q, info.device, info.host_name);
  }
  return ncclSuccess;
}

std::string Session::unreachable(int q, const char* doing, const std::string& why) {
  return doing + (" rank " + std::to_string(q)) + " (" + peer(q).str() + ", " +
         peer(q).info.endpoint.address().str() + "): " + why;
}

ncclResult_t Session::link_failed(int q, const char* doing, const std::string& why, int error) {
  return fail(out_of_descriptors(error) ? ncclSystemError : ncclRemoteError, "rank %d of %d %s", rank, nranks,
              unreachable(q, doing, why).c_str());
}

// ---- links ----

// Checks the limit before it opens the first connection: a rank that runs out of descriptors later would look
// dead.
ncclResult_t Session::check_descriptors() {
  size_t lines = count_missing_lines(rank, table_);
  bool passes = false;  // the segment, over a connection of its own
  for (int q = 0; q < nranks; ++q)
    passes = passes || (q != rank && !peer(q).same_process && peer(q).local >= 0);
  // The segment; the two of the DataWatch.
  size_t needed = 1 + 2 * size_t(hosts_ > 1) + lines + passes;
  if (needed < 16) return ncclSuccess;  // counting costs more
  Descriptors d = count_descriptors();
  if (d.open + needed <= d.limit) return ncclSuccess;
  return fail(ncclSystemError,
              "rank %d of %d needs %zu file descriptors for its peers; %zu are open of the %zu that "
              "RLIMIT_NOFILE (ulimit -n) allows this process",
              rank, nranks, needed, d.open, d.limit);
}

uint64_t Session::seen_news() {
  std::lock_guard<std::mutex> lock(mutex);
  return news_;
}

void Session::has_news() {
  std::lock_guard<std::mutex> lock(mutex);
  ++news_;
  changed.notify_all();
}

// Until there is some. It is worth another look every now and then, too.
ncclResult_t Session::await_news(uint64_t seen, int q, const char* doing) {
  {
    std::unique_lock<std::mutex> lock(mutex);
    Deadline look = std::min<Deadline>(deadline_, Clock::now() + 4 * kLook);
    changed.wait_until(lock, look, [&] { return news_ != seen || stopped(); });
    if (news_ != seen && !stopped()) return ncclSuccess;
  }
  int error = stopped() ? ECANCELED : starved() ? EMFILE : 0;
  if (error) return link_failed(q, doing, describe_error(error), error);
  if (has_bad_news(self.token) || Clock::now() < deadline_) return ncclSuccess;
  return fail(ncclTimeout, "rank %d of %d timed out waiting for rank %d (%s) to connect", rank, nranks, q,
              peer(q).str().c_str());
}

// A connection that another process has opened for this rank.
ncclResult_t Session::await_arrival(HelloKind kind, int q, const char* doing, SocketPtr* socket) {
  auto key = std::make_pair(int(kind), q);
  for (;;) {
    uint64_t seen;
    {
      std::lock_guard<std::mutex> lock(mutex);
      seen = news_;
      auto it = waiting_.find(key);
      if (it != waiting_.end()) {
        *socket = std::move(it->second);
        waiting_.erase(it);
        return ncclSuccess;
      }
    }
    if (has_bad_news(self.token)) return told_before(q, doing);
    if (ncclResult_t r = await_news(seen, q, doing); r != ncclSuccess) return r;
  }
}

// Ranks of one process need no connection. Those of two processes share the line between these.
ncclResult_t Session::open_links() {
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank || p.info.process != self.process) continue;
    if (!link(p.info.token, q, self.token)) return gone_from_here(q, kConnecting);
    p.same_process = true;
    std::lock_guard<std::mutex> lock(mutex);
    p.linked = true;
  }
  if (ncclResult_t r = check_descriptors(); r != ncclSuccess) return r;
  return open_lines();
}

ncclResult_t Session::open_lines() {
  std::vector<int> missing;
  std::map<int, int> calls;
  for (int q = 0; q < nranks; ++q)
    if (q != rank && !peer(q).same_process) missing.push_back(q);
  Deadline check = Clock::now() + kCheck;
  while (!missing.empty()) {
    const uint64_t seen = seen_news();
    int dials = -1;
    for (auto& [q, line] : link_lines(self.token, rank, table_, &missing, &dials)) {
      Peer& p = peer(q);
      p.vouched = p.local >= 0 && line->pid() == p.info.pid;
      std::lock_guard<std::mutex> lock(mutex);
      p.line = line;
      p.linked = true;
    }
    if (dials >= 0) {
      ncclResult_t r = call(dials, ++calls[dials]);
      if (r != ncclSuccess) return r;
    } else if (!missing.empty()) {
      const int q = missing[0];
      if (has_bad_news(self.token)) return told_before(q, kConnecting);
      if (ncclResult_t r = await_news(seen, q, kConnecting); r != ncclSuccess) return r;
      if (Clock::now() < check) continue;
      if (ncclResult_t r = check_alive(q); r != ncclSuccess) return r;
      check = Clock::now() + kCheck;
    }
  }
  std::lock_guard<std::mutex> lock(mutex);
  all_linked_ = true;
  return ncclSuccess;
}

// A process that has too many strangers ends connections (Admission), so it is called again.
ncclResult_t Session::call(int q, int attempt) {
  Peer& p = peer(q);
  const bool local = p.local >= 0;
  LineCall call(p.info.process, local);
  if (attempt > kMostCalls) return link_failed(q, kConnecting, describe_error(ECONNRESET), ECONNRESET);
  if (attempt > 1) std::this_thread::sleep_for(attempt * kRetry);
  std::string why;
  SocketPtr socket = connect_peer(p.info, local, HelloKind::Line, rank, deadline_, stop_, &why);
  if (!socket) return link_failed(q, kConnecting, why, errno);
  call.connected(std::move(socket));
  return ncclSuccess;
}

// A process that has died before it could connect.
ncclResult_t Session::check_alive(int q) {
  std::string why;
  Deadline soon = std::min<Deadline>(deadline_, Clock::now() + kCheck);
  if (connect_peer(peer(q).info, peer(q).local >= 0, HelloKind::Note, rank, soon, stop_, &why))
    return ncclSuccess;
  return errno == ECONNREFUSED ? link_failed(q, kConnecting, why, ECONNREFUSED) : ncclSuccess;
}

// ---- data connections ----

DataLinks* Session::data_links() {
  std::lock_guard<std::mutex> lock(mutex);
  return links_.get();
}

SocketPtr Session::dial(int to, Channel channel, Stop& stop, std::string* why) {
  const HelloKind kind = channel == kColl ? HelloKind::CollData : HelloKind::P2pData;
  for (int attempt = 1;; ++attempt) {
    // Like the call that waits for it: a process that is stopped accepts it when it goes on.
    SocketPtr socket = connect_peer(peer(to).info, false, kind, rank, kForever, stop, why);
    if (!socket) return nullptr;
    Stop::During waiting(stop, [socket] { shutdown(socket->fd(), SHUT_RDWR); });
    if (await_acceptance(to, channel, *socket)) return socket;
    const int error = errno;
    *why = describe_error(error);
    if (attempt == kMostCalls || stop.is_set()) return errno = error, nullptr;
    std::this_thread::sleep_for(attempt * kRetry);
  }
}

// The other process accepts nothing if it lacks descriptors; when it hears that this rank waits, it says so.
bool Session::await_acceptance(int to, Channel channel, const Socket& socket) {
  for (char accepted;;) {
    if (recv_all(socket.fd(), &accepted, sizeof accepted, Clock::now() + kAcceptance)) return true;
    if (errno != ETIMEDOUT) return false;
    send(to, Ctl::Dial, nullptr, 0, channel);
  }
}

void Session::ask_to_dial(int to, Channel channel) { send(to, Ctl::Dial, nullptr, 0, channel); }

void Session::asked_to_dial(int from, uint64_t channel) {
  DataLinks* links = data_links();
  if (!links || channel >= kChannels || peer(from).local >= 0) return;
  if (from < rank) return links->asked(from, Channel(channel));
  if (starved()) cannot_connect(from, describe_error(EMFILE), EMFILE);
}

bool Session::is_gone(int q) { return peer(q).gone.load(); }

bool Session::cannot_connect(int q, const std::string& why, int error) {
  const bool lacks = out_of_descriptors(error) || error == EAGAIN;
  if (!lacks) {
    // The news of the other rank's end, or of a failure, may come after the end of the connection.
    std::unique_lock<std::mutex> lock(mutex);
    const bool explained = changed.wait_until(lock, after_ms(1000), [&] {
      return peer(q).gone || peer(q).left || owner_.error() != ncclSuccess || stopped();
    });
    if (explained) return owner_.error() != ncclSuccess;
  }
  owner_.give_up(lacks ? ncclSystemError : ncclRemoteError, unreachable(q, kConnecting, why), {});
  return true;
}

void Session::connected() { owner_.wake(); }

SinkPtr Session::keep_alive() { return owner_.sink(); }

void Session::arrived(const Hello& hello, SocketPtr socket) {
  if (hello.kind == HelloKind::CollData || hello.kind == HelloKind::P2pData) {
    DataLinks* links = data_links();
    if (links && hello.rank > rank && hello.rank < nranks && peer(hello.rank).local < 0)
      links->arrived(hello.rank, hello.kind == HelloKind::CollData ? kColl : kP2p, std::move(socket));
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto key = std::make_pair(int(hello.kind), hello.rank);
  if (all_arrived_ || hello.rank < 0 || hello.rank >= kMostRanks || waiting_.count(key)) return;
  waiting_[key] = std::move(socket);
  ++news_;
  changed.notify_all();
}

int Session::known_ranks() {
  std::lock_guard<std::mutex> lock(mutex);
  return int(peers_.size());
}

bool Session::linked(int to) {
  std::lock_guard<std::mutex> lock(mutex);
  return size_t(to) < peers_.size() && peer(to).linked;
}

void Session::send(int to, Ctl kind, const void* body, size_t bytes, uint64_t tag) {
  bool here, unlinked;
  LinePtr line;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (disconnected_ || size_t(to) >= peers_.size() || peer(to).gone) return;
    here = peer(to).info.process == self.process;
    line = peer(to).line;
    unlinked = !here && !line;
    if (here ? to == rank : unlinked && (all_linked_ || kind != Ctl::Error || in_service())) return;
  }
  const PeerInfo& info = peer(to).info;
  Blob blob = Blob::copy(body, bytes);
  if (here) return post(info.token, rank, kind, tag, blob);
  // This rank fails before it is linked with the other one, which may wait for it.
  if (unlinked) line = line_to(info, peer(to).local >= 0);
  if (line) return void(line->send(info.token, rank, kind, tag, blob));
  if (tell_by_ == kForever) tell_by_ = after_ms(2000);
  send_note(info, peer(to).local >= 0, rank, kind, blob, tell_by_);
}

void Session::send(const std::vector<int>& to, Ctl kind, const void* body, size_t bytes) {
  std::map<LinePtr, std::vector<Recipient>> there;
  std::vector<int> others;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (disconnected_) return;
    for (int q : to) {
      const Peer* p = size_t(q) < peers_.size() ? peers_[size_t(q)].get() : nullptr;
      if (p && p->line && !p->gone)
        there[p->line].push_back({p->info.token});
      else
        others.push_back(q);
    }
  }
  const Blob blob = Blob::copy(body, bytes);
  for (auto& [line, recipients] : there) line->send(recipients, rank, kind, blob);
  for (int q : others) send(q, kind, body, bytes);
}

bool Session::has_room(int to) {
  std::lock_guard<std::mutex> lock(mutex);
  return !peer(to).line || peer(to).line->has_room();
}

void Session::describe(RankState state, std::vector<char>* out) {
  std::lock_guard<std::mutex> lock(mutex);
  if (peers_.empty()) return;
  state.hash = hash;
  state.rank = rank;
  state.nranks = nranks;
  append(out, state);
  for (auto& p : peers_) {
    RankPlace place;
    place.process = p->info.process;
    place.unix_name = p->info.unix_name;
    place.host = p->info.host;
    place.pid = p->info.pid;
    place.endpoint = p->info.endpoint;
    place.device = p->info.device;
    place.presence = p->left ? Presence::Left : p->gone ? Presence::Dead : Presence::Here;
    memcpy(place.host_name, p->info.host_name, sizeof place.host_name);
    append(out, place);
  }
}

void Session::echo(Ctl kind, const void* body, size_t bytes) {
  post(self.token, rank, kind, 0, Blob::copy(body, bytes));
}

void Session::disconnect() noexcept {
  if (self.token != Token()) forget(self.token);
  {
    std::lock_guard<std::mutex> lock(mutex);
    all_arrived_ = disconnected_ = true;
    waiting_.clear();
    for (auto& p : peers_) p->linked = false;
  }
  // The others must receive the reason of the end before this process ends. Busy ranks read it slowly.
  const std::chrono::milliseconds patience(2000 + 8 * std::min(nranks, 1024));
  Deadline deadline = Clock::now() + patience;
  LinePtr drained;
  for (auto& p : peers_) {
    LinePtr line;
    {
      std::lock_guard<std::mutex> lock(mutex);
      line = std::move(p->line);
    }
    if (!line || line == drained) continue;
    deadline = line->drain(deadline, patience);
    drained = std::move(line);
  }
  if (links_) links_->stop(), links_->watch().stop();
  for (auto& p : peers_)
    for (auto& pipe : p->link.pipe)
      if (pipe) pipe->close();
  if (!offers_segment_) return;
  Offers& offers = per_process<Offers>();
  std::lock_guard<std::mutex> lock(offers.mutex);
  offers.segments.erase(self.token);
}

void Session::drop_connections() {
  for (int q = 0; q < int(peers_.size()); ++q) {
    Peer& p = peer(q);
    if (q == rank) continue;
    // The line may serve other ranks.
    if (p.same_process)
      hang_up(p.info.token, rank);
    else if (p.line)
      p.line->send(p.info.token, rank, Ctl::Closed, 0, {});
    hang_up(self.token, q);
    for (auto& pipe : p.link.pipe)
      if (SocketPtr socket = pipe ? pipe->socket() : nullptr) shutdown(socket->fd(), SHUT_RDWR);
  }
  if (links_) links_->drop();
  // Shared memory would still work until the service notices the ends.
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait_until(lock, after_ms(1000), [&] { return nranks == 1 || owner_.error() != ncclSuccess; });
}

// ---- the host's shared segment ----

// The first rank of a host creates the segment and passes it to the first rank of every other process, which
// shares it with the other ranks of its process.
ncclResult_t Session::share_segment() {
  if (local_count_ < 2) return ncclSuccess;
  int leader = 0;
  while (peer(leader).local != 0) ++leader;
  int first = 0;
  while (peer(first).info.process != self.process || peer(first).local < 0) ++first;
  ncclResult_t r = leader == rank  ? create_segment()
                   : first == rank ? receive_segment(leader)
                                   : take_segment(first);
  if (r != ncclSuccess) return r;
  me_ = &segment_->cell(local_);
  if (first != rank) return ncclSuccess;
  Offers& offers = per_process<Offers>();
  std::lock_guard<std::mutex> lock(offers.mutex);
  offers.segments[self.token] = segment_;
  offers_segment_ = true;
  offers.changed.notify_all();
  return ncclSuccess;
}

ncclResult_t Session::create_segment() {
  segment_ = std::make_shared<Segment>(local_count_, ring_bytes, coll_factor(local_count_));
  if (ncclResult_t r = segment_->create(); r != ncclSuccess) return r;
  std::set<Token> served{self.process};
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (p.local < 0 || !served.insert(p.info.process).second) continue;
    std::string why;
    SocketPtr socket = connect_peer(p.info, true, HelloKind::Segment, rank, deadline_, stop_, &why);
    int error = errno;
    CtlHeader header{Ctl::Segment, 0, segment_->ring_bytes()};
    if (socket && send_all(socket->fd(), &header, sizeof header, deadline_) &&
        send_fd(socket->fd(), segment_->fd()))
      continue;
    if (socket) why = describe_error(error = errno);
    if (has_bad_news(self.token)) return told_before(q, kSharing);
    return link_failed(q, kSharing, why, error);
  }
  return ncclSuccess;
}

ncclResult_t Session::receive_segment(int leader) {
  SocketPtr socket;
  if (ncclResult_t r = await_arrival(HelloKind::Segment, leader, kGettingSegment, &socket); r != ncclSuccess)
    return r;
  Stop::During waiting(stop_, [socket] { shutdown(socket->fd(), SHUT_RDWR); });
  CtlHeader header{Ctl::Error, 0, 0};
  Fd fd;
  if (recv_all(socket->fd(), &header, sizeof header, deadline_)) fd = recv_fd(socket->fd(), deadline_);
  int error = stopped() ? ECANCELED : errno;
  if (!fd && has_bad_news(self.token)) return told_before(leader, kGettingSegment);
  if (!fd) return link_failed(leader, kGettingSegment, describe_error(error), error);
  uint64_t ring = header.tag;
  if (header.kind != Ctl::Segment || ring < 512 || ring > ring_bytes || (ring & (ring - 1)))
    return link_failed(leader, kGettingSegment,
                       "rings of " + std::to_string(ring) + " bytes; expected at most " +
                           std::to_string(ring_bytes) + " (PYNCCL_CPU_RING_BYTES of this rank)",
                       0);
  segment_ = std::make_shared<Segment>(local_count_, size_t(ring), coll_factor(local_count_));
  return segment_->open(std::move(fd));
}

// A rank of this process cannot have died. It may have sent the reason of its end.
ncclResult_t Session::gone_from_here(int q, const char* doing) {
  attach(self.token);
  hang_up(self.token, q);  // after all frames that it sent
  return cut_off(q, doing, "it has failed or was aborted");
}

// A rank has told of an end or a failure while this one waited for `q`.
ncclResult_t Session::told_before(int q, const char* doing) {
  attach(self.token);
  int told = q;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (int r = 0; r < nranks; ++r)
      if (peer(r).gone) told = r;
  }
  return cut_off(told, doing, "it died, has failed or was aborted");
}

ncclResult_t Session::take_segment(int first) {
  Offers& offers = per_process<Offers>();
  const Token& key = peer(first).info.token;
  std::unique_lock<std::mutex> lock(offers.mutex);
  for (;;) {
    auto it = offers.segments.find(key);
    if (it != offers.segments.end()) return segment_ = it->second, ncclSuccess;
    offers.changed.wait_until(lock, std::min<Deadline>(deadline_, Clock::now() + kLook));
    if (offers.segments.count(key)) continue;
    lock.unlock();
    if (stopped()) return link_failed(first, kGettingSegment, "aborted", 0);
    if (!lives_here(key)) return gone_from_here(first, kGettingSegment);
    if (has_bad_news(self.token)) return told_before(first, kGettingSegment);
    if (Clock::now() >= deadline_)
      return fail(ncclTimeout, "rank %d of %d timed out waiting for the shared memory of rank %d", rank,
                  nranks, first);
    lock.lock();
  }
}

ncclResult_t Session::create_data_links() {
  if (links_) return ncclSuccess;
  std::unique_ptr<DataLinks> links = DataLinks::create(*this, rank, nranks);
  if (!links) return fail_at(rank, nranks, ncclSystemError, "%s", describe_error(errno).c_str());
  std::lock_guard<std::mutex> lock(mutex);
  links_ = std::move(links);
  return ncclSuccess;
}

ncclResult_t Session::attach_pipes() {
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank) continue;
    p.link.name = p.str();
    if (p.local < 0) {
      if (ncclResult_t r = create_data_links(); r != ncclSuccess) return r;
      for (Channel channel : {kColl, kP2p}) p.link.pipe[channel] = links_->pipe(q, channel);
      continue;
    }
    segment_->attach(local_, p.local, &p.link);
    const PeerInfo& i = p.info;
    if (direct_allowed_ && p.same_process)
      p.link.memory = own_memory();
    else if (direct_allowed_ && p.vouched)
      p.link.memory = process_memory({i.pid, i.nonce_addr, {i.nonce[0], i.nonce[1]}});
  }
  if (links_) links_->watch().start(owner_.sink());
  return ncclSuccess;
}

// ---- settings that must be equal ----

void Session::say_settings() {
  std::vector<char> mine(sizeof(Settings) + size_t(nranks));
  inline_bytes = std::min(inline_bytes, (segment_ ? segment_->ring_bytes() : ring_bytes) - sizeof(Passed));
  if (segment_) board_bytes = segment_->shown_bytes();
  Settings settings{inline_bytes, shown_bytes, board_bytes, block_bytes, contexts, signals, by_hosts};
  memcpy(mine.data(), &settings, sizeof settings);
  for (int q = 0; q < nranks; ++q) {
    Memory* memory = peer(q).link.memory.get();
    mine[sizeof(Settings) + size_t(q)] = memory && memory->works();
  }
  settings_ = Blob::of(std::move(mine));
}

// Agrees on the settings, and on the pairs of ranks that access each other's memory.
ncclResult_t Session::finish() {
  if (nranks == 1) return ncclSuccess;
  std::vector<Blob> all;
  if (ncclResult_t r =
          hear(Tags(size_t(nranks)), everyone(), settings_, &all, "setting up", deadline_, seconds);
      r != ncclSuccess)
    return r;
  // Whether rank q has access to the memory of rank p.
  auto reads = [&](int p, int q) { return all[size_t(p)].data[sizeof(Settings) + size_t(q)]; };
  bool direct = false;
  staged = hosts_ == 1;
  for (int q = 0; q < nranks; ++q) {
    const Blob& theirs = all[size_t(q)];
    if (theirs.size != settings_.size)
      return fail(ncclInternalError, "rank %d sent settings of %zu bytes, expected %zu", q, theirs.size,
                  settings_.size);
    Settings settings;
    memcpy(&settings, theirs.data, sizeof settings);
    if (settings.contexts != contexts || settings.signals != signals)
      return fail(kMismatch, "%srank %d has config.numRmaCtx %d and numRmaSig %d, rank %d %d and %d",
                  kMismatchText, rank, contexts, signals, q, settings.contexts, settings.signals);
    inline_bytes = std::min(inline_bytes, size_t(settings.inline_bytes));
    shown_bytes = std::min(shown_bytes, size_t(settings.shown_bytes));
    board_bytes = std::min(board_bytes, size_t(settings.board_bytes));
    by_hosts = by_hosts && settings.by_hosts;
    if (!reads(rank, q) || !reads(q, rank)) peer(q).link.memory.reset();
    for (int p = 0; p < q && staged; ++p) staged = !reads(p, q) || !reads(q, p);
    direct = direct || peer(q).link.direct();
  }
  log(Level::Info, "rank %d of %d: %d ranks on this host, %d hosts, %s", rank, nranks, local_count_, hosts_,
      local_count_ < 2 ? "tcp"
      : direct         ? "direct reads"
                       : "shared memory");
  return ncclSuccess;
}

// Ranks that share cores must not spin, since a peer needs the core. With a core for each rank sleeping is
// slower: an idle core of a virtual machine takes up to 100 us to wake, longer than most of a collective.
void Session::choose_wait_policy() {
  int64_t us = param_int("PYNCCL_CPU_SPIN_US");
  cpu_set_t set;
  int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  bool room = local_count_ <= cpus;
  wait_policy_.spin_ns = wait_policy_.yield_ns = (us >= 0 ? us : room ? 50 : 0) * 1000;
  // If ranks share cores, a peer may work during a yield.
  wait_policy_.interrupted_ns = (us >= 0 ? 0 : room ? 200 : 1000) * 1000;
  // The kernel tends to run the two ends of a loopback connection on one core.
  if (us < 0 && hosts_ > 1) wait_policy_.spin_ns = std::min<int64_t>(wait_policy_.spin_ns, 2 * 1000);
  underway_policy_ = wait_policy_;
  if (us >= 0) return;
  if (!room) wait_policy_.yield_ns = 20 * 1000;
  underway_policy_.yield_ns = (room ? 2000 : 50) * 1000;
}

// ---- exchanges ----

// A rank does not answer in an exchange. If it has left or has reported an error, this explains more than the
// end of the connection. A sender may see the end before the service has read the frames before it. In an
// exchange after a failure the reason is another one.
ncclResult_t Session::cut_off(int q, const char* what, const std::string& why, uint64_t tag) {
  if (tag >= kAfterFailure) return lost_meanwhile(q);
  bool left;
  {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_until(lock, after_ms(1000), [&] {
      return peer(q).left || peer(q).gone || owner_.error() != ncclSuccess || stopped();
    });
    left = peer(q).left;
  }
  if (left) owner_.never_ends(q, what);
  if (owner_.error() == ncclSuccess) return link_failed(q, what, why, 0);
  return fail_at(rank, nranks, owner_.error_code(), "%s", owner_.error_text().c_str());
}

ncclResult_t Session::lost_meanwhile(int q) {
  return fail_at(rank, nranks, ncclRemoteError, "rank %d (%s) died, or gave up, meanwhile", q,
                 peer(q).str().c_str());
}

ncclResult_t Session::exchange(const Tags& tags, const std::vector<int>& ranks, const std::vector<char>& mine,
                               std::vector<Blob>* all, const char* what, double limit) {
  Deadline deadline = after_seconds(limit);
  // A peer could take this for the part in an earlier exchange that it still misses.
  if (owner_.broken(tags[0])) return owner_.say_broken(tags[0]);
  Blob blob = Blob::of(mine);
  ncclResult_t r = say(tags, ranks, blob, what);
  LateRanks late;
  if (r == ncclSuccess) r = hear(tags, ranks, blob, all, what, deadline, limit, &late);
  if (r == ncclTimeout) return blame(late);
  if (r == ncclSuccess || stopped()) return r;
  // The others may have all that they need, and wait for this rank.
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i] != rank) send(ranks[i], Ctl::Absent, nullptr, 0, tags[i]);
  return r;
}

ncclResult_t Session::say(const Tags& tags, const std::vector<int>& ranks, const Blob& mine,
                          const char* what) {
  struct Others {
    std::vector<Recipient> recipients;
    size_t first;
  };
  size_t lost = ranks.size();  // the others do not wait for what was said
  Posts here;
  std::map<LinePtr, Others> there;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank) continue;
    const Peer& p = peer(ranks[i]);
    std::lock_guard<std::mutex> lock(mutex);
    if (!p.linked || p.gone)
      lost = std::min(lost, i);
    else if (p.line)
      there.try_emplace(p.line, Others{{}, i}).first->second.recipients.push_back({p.info.token, tags[i]});
    else
      here.push_back({p.info.token, rank, {Ctl::Exchange, uint32_t(mine.size), tags[i]}, mine});
  }
  post(std::move(here));
  // A frame for all ranks of a process.
  for (auto& [line, others] : there)
    if (!line->send(others.recipients, rank, Ctl::Exchange, mine)) lost = std::min(lost, others.first);
  return lost == ranks.size() ? ncclSuccess : cut_off(ranks[lost], what, "it died or left", tags[lost]);
}

void Session::exchanged(int from, uint64_t tag, const Blob& body) {
  std::lock_guard<std::mutex> lock(mutex);
  for (Gathering* g : gatherings_) {
    auto it = g->tags.find(from);
    if (it == g->tags.end() || it->second != tag) continue;
    g->said[from] = body;
    g->tags.erase(it);
    if (g->tags.empty()) changed.notify_all();
    return;
  }
  untaken_[{from, tag}] = body;
}

bool Session::awaits(int q) {
  std::lock_guard<std::mutex> lock(mutex);
  return std::any_of(gatherings_.begin(), gatherings_.end(),
                     [&](const Gathering* g) { return g->tags.count(q); });
}

// Lists an exchange until its wait has ended, also by an exception.
struct Session::Listed {
  Listed(Session& session_, Gathering& g_, std::unique_lock<std::mutex>& lock_)
      : session(session_), g(g_), lock(lock_) {
    session.gatherings_.push_back(&g);
  }
  ~Listed() {
    if (!lock.owns_lock()) lock.lock();
    auto& all = session.gatherings_;
    all.erase(std::find(all.begin(), all.end(), &g));
    if (!g.searched) return;
    // The search locks itself first, and then sessions.
    lock.unlock();
    session.owner_.met(&g);
    lock.lock();
  }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;
  Session& session;
  Gathering& g;
  std::unique_lock<std::mutex>& lock;
};

// False at the deadline. Ranks of a communicator that is complete may wait for each other.
bool Session::await_all(Gathering& g, std::unique_lock<std::mutex>& lock, const char* what, Deadline deadline,
                        const std::function<bool()>& done) {
  const Clock::time_point begin = Clock::now();
  Listed listed(*this, g, lock);
  for (;;) {
    Deadline look = std::min<Deadline>(deadline, Clock::now() + kSearch);
    bool ended = changed.wait_until(lock, look, done);
    if (ended || look == deadline) return ended;
    std::map<int, uint64_t> missing = g.tags;
    g.searched = true;
    lock.unlock();
    owner_.meets(&g, missing, what, std::chrono::duration<double>(Clock::now() - begin).count());
    lock.lock();
  }
}

ncclResult_t Session::hear(const Tags& tags, const std::vector<int>& ranks, const Blob& mine,
                           std::vector<Blob>* all, const char* what, Deadline deadline, double limit,
                           LateRanks* late) {
  std::unique_lock<std::mutex> lock(mutex);
  Gathering g;
  g.said[rank] = mine;
  for (size_t i = 0; i < ranks.size(); ++i) {
    auto early = untaken_.find({ranks[i], tags[i]});
    if (early != untaken_.end())
      g.said[ranks[i]] = std::move(early->second), untaken_.erase(early);
    else if (ranks[i] != rank)
      g.tags[ranks[i]] = tags[i];
  }
  auto lost = [&] {
    for (auto& [q, tag] : g.tags)
      if (peer(q).gone || peer(q).left) return q;
    return -1;
  };
  auto failed = [&] { return owner_.broken(tags[0]); };
  bool ended = await_all(g, lock, what, deadline,
                         [&] { return stopped() || g.tags.empty() || failed() || lost() >= 0; });
  int missing = g.tags.empty() ? -1 : lost() >= 0 ? lost() : g.tags.begin()->first;
  lock.unlock();
  if (missing < 0) {
    all->clear();
    for (int r : ranks) all->push_back(std::move(g.said[r]));
    return ncclSuccess;
  }
  if (stopped()) return fail(ncclInternalError, "rank %d: %s was aborted", rank, what);
  if (failed()) return owner_.say_broken(tags[0]);
  if (ended) return cut_off(missing, what, "it died or left", tags[0]);
  std::string who;
  for (auto& [q, tag] : g.tags) {
    who += (who.empty() ? "rank " : ", rank ") + std::to_string(q) + " (" + peer(q).str() + ")";
    if (late) late->add(q);
  }
  const bool by_default = limit == param_seconds("PYNCCL_CPU_INIT_TIMEOUT");
  return fail_at(rank, nranks, ncclTimeout, "%s timed out waiting for %s%s", what, who.c_str(),
                 by_default ? " (PYNCCL_CPU_INIT_TIMEOUT)" : "");
}

}  // namespace pncpu
