#include "session/session.hpp"

#include <poll.h>
#include <sched.h>

#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "base/device.hpp"
#include "base/fork.hpp"
#include "ops/collectives.hpp"
#include "ras/server.hpp"
#include "service/dial.hpp"

namespace pncpu {
namespace {

// Beyond this a put waits until the peer has read more.
constexpr size_t kMostUnsentPuts = size_t(1) << 20;

constexpr auto kLook =
    std::chrono::milliseconds(50);  // how often a wait polls for changes without a notification
constexpr auto kSearch = std::chrono::seconds(1);  // how often an exchange looks for a deadlock

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

Session::Session(Owner& owner, int device)
    : owner_(owner), device_(device), direct_allowed_(param_int("PYNCCL_CPU_DIRECT") != 0) {
  inline_bytes = size_t(std::max<int64_t>(0, param_int("PYNCCL_CPU_INLINE_BYTES")));
  shown_bytes = size_t(std::max<int64_t>(0, param_int("PYNCCL_CPU_SHOWN_BYTES")));
  board_bytes = SIZE_MAX;
  block_bytes = align_up(size_t(std::max<int64_t>(4096, param_int("PYNCCL_CPU_BLOCK_BYTES"))), 4096);
  by_hosts = param_int("PYNCCL_CPU_BY_HOSTS") != 0;
  seconds = std::min(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"), most_seconds);
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
  Announce mine;
  mine.rank = rank;
  mine.nranks = nranks;
  mine.ids_hash = ids_hash;
  mine.nids = int(ids.size());
  mine.pid = self.pid;
  mine.seconds = seconds;
  memcpy(mine.host_name, self.host_name, sizeof mine.host_name);
  return pncpu::join(ids, mine, self, stop_, table);
}

void Session::stop() {
  stop_.set();
  std::lock_guard<std::mutex> lock(mutex);
  changed.notify_all();
}

void Session::stop_creation() {
  std::lock_guard<std::mutex> lock(mutex);
  if (complete_) return;
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
    return fail(ncclInternalError, "rank %d of %d: the root's table has another process for this rank", rank,
                nranks);
  if (ncclResult_t r = read_table(); r != ncclSuccess) return r;
  choose_wait_policy();
  if (nranks == 1) return ncclSuccess;
  if (ncclResult_t r = open_links(); r != ncclSuccess) return r;
  if (ncclResult_t r = share_segment(); r != ncclSuccess) return r;
  if (ncclResult_t r = attach_pipes(); r != ncclSuccess) return r;
  for (int q = 0; q < nranks; ++q)
    if (peer(q).control) watch_control(peer(q).control, q, owner_.sink());
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

ncclResult_t Session::link_failed(int q, const char* doing, const std::string& why, int error) {
  return fail(out_of_descriptors(error) ? ncclSystemError : ncclRemoteError,
              "rank %d of %d %s rank %d (%s, %s): %s", rank, nranks, doing, q, peer(q).str().c_str(),
              peer(q).info.endpoint.address().str().c_str(), why.c_str());
}

// ---- links ----

// Checks the limit before it opens the first connection: a rank that runs out of descriptors later would look
// dead.
ncclResult_t Session::check_descriptors() {
  size_t needed = 1 + 2 * size_t(hosts_ > 1);  // the segment; the two of the DataWatch
  for (int q = 0; q < nranks; ++q)
    if (q != rank && !peer(q).same_process) needed += peer(q).local >= 0 ? 1 : 3;
  if (needed < 16) return ncclSuccess;  // counting costs more
  Descriptors d = count_descriptors();
  if (d.open + needed <= d.limit) return ncclSuccess;
  return fail(ncclSystemError,
              "rank %d of %d needs %zu file descriptors for its peers; %zu are open of the %zu that "
              "RLIMIT_NOFILE (ulimit -n) allows this process",
              rank, nranks, needed, d.open, d.limit);
}

namespace {
// A rank sends frames only after it has all of its links, or if it fails.
bool has_news(int fd) {
  pollfd poll_fd{fd, POLLIN, 0};
  return poll(&poll_fd, 1, 0) > 0;
}
}  // namespace

SocketPtr Session::await_arrival(HelloKind kind, int q, std::string* why) {
  auto key = std::make_pair(int(kind), q);
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex);
    Deadline look = std::min<Deadline>(deadline_, Clock::now() + 4 * kLook);
    changed.wait_until(lock, look, [&] { return waiting_.count(key) || stopped(); });
    auto it = waiting_.find(key);
    if (it != waiting_.end()) {
      SocketPtr socket = std::move(it->second);
      waiting_.erase(it);
      return socket;
    }
    lock.unlock();
    if (kind != HelloKind::Control && has_news(peer(q).control->fd())) return errno = ECONNRESET, nullptr;
    errno = stopped() ? ECANCELED : starved() ? EMFILE : Clock::now() >= deadline_ ? ETIMEDOUT : 0;
    if (errno) return *why = describe_error(errno), nullptr;
  }
}

// Ranks of one process need no sockets. In every other pair the higher rank connects.
ncclResult_t Session::open_links() {
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank || p.info.process != self.process) continue;
    if (!link(p.info.token, q, self.token)) {
      return gone_from_here(q, "cannot reach");
    }
    p.same_process = true;
    std::lock_guard<std::mutex> lock(mutex);
    p.linked = true;
  }
  if (ncclResult_t r = check_descriptors(); r != ncclSuccess) return r;
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank || p.same_process) continue;
    bool local = p.local >= 0;
    for (HelloKind kind : {HelloKind::Control, HelloKind::CollData, HelloKind::P2pData}) {
      if (local && kind != HelloKind::Control) break;
      std::string why;
      SocketPtr socket = q < rank ? connect_peer(p.info, local, kind, rank, deadline_, stop_, &why)
                                  : await_arrival(kind, q, &why);
      int error = errno;
      if (!socket && q > rank && error == ETIMEDOUT)
        return fail(ncclTimeout, "rank %d of %d timed out waiting for rank %d (%s) to connect", rank, nranks,
                    q, p.str().c_str());
      if (!socket && kind != HelloKind::Control) return said_before(q, "cannot connect to", error);
      if (!socket) return link_failed(q, "cannot connect to", why, error);
      if (kind != HelloKind::Control) {
        p.link.pipe[kind == HelloKind::CollData ? kColl : kP2p] = tcp_pipe(socket);
        continue;
      }
      p.vouched = local && socket->peer_pid() == p.info.pid;
      std::lock_guard<std::mutex> lock(mutex);
      p.control = std::move(socket);
      p.linked = true;
    }
  }
  std::lock_guard<std::mutex> lock(mutex);
  all_arrived_ = true;
  waiting_.clear();
  return ncclSuccess;
}

void Session::arrived(const Hello& hello, SocketPtr socket) {
  std::lock_guard<std::mutex> lock(mutex);
  auto key = std::make_pair(int(hello.kind), hello.rank);
  if (all_arrived_ || hello.rank < 0 || hello.rank >= kMostRanks || waiting_.count(key)) return;
  waiting_[key] = std::move(socket);
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
  SocketPtr control;
  bool here, waits;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (disconnected_ || size_t(to) >= peers_.size() || peer(to).gone) return;
    here = peer(to).info.process == self.process;
    control = peer(to).control;
    // The peer has connected, and this rank fails before it takes the connection.
    auto early = waiting_.find({int(HelloKind::Control), to});
    if (!control && early != waiting_.end()) control = early->second;
    waits = to < rank && !all_arrived_;
  }
  Blob blob = Blob::copy(body, bytes);
  if (!here && !control && waits && kind == Ctl::Error) {
    // This rank fails before it connects to the other one, which waits for the connection.
    if (tell_by_ == kForever) tell_by_ = after_ms(2000);
    return send_once(peer(to).info, peer(to).local >= 0, rank, kind, blob, tell_by_);
  }
  if (!here && !control) return;
  if (control)
    control->send_frame(kind, tag, blob);
  else if (to != rank)
    post(peer(to).info.token, rank, kind, tag, blob);
}

bool Session::has_room(int to) {
  SocketPtr control;
  {
    std::lock_guard<std::mutex> lock(mutex);
    control = peer(to).control;
  }
  return !control || control->unsent() < kMostUnsentPuts;
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
  // The others must receive the reason of the end before the connection ends.
  Deadline deadline = after_ms(2000);
  for (auto& p : peers_) {
    SocketPtr control;
    {
      std::lock_guard<std::mutex> lock(mutex);
      control = std::move(p->control);
    }
    if (!control) continue;
    control->drain(deadline);
    unwatch(control);
  }
  if (data_) data_->stop();
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
    if (p.control) shutdown(p.control->fd(), SHUT_RDWR);
    if (p.same_process) {
      hang_up(p.info.token, rank);
      hang_up(self.token, q);
    }
    for (auto& pipe : p.link.pipe)
      if (SocketPtr socket = pipe ? pipe->socket() : nullptr) shutdown(socket->fd(), SHUT_RDWR);
  }
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
  segment_ = std::make_shared<Segment>(local_count_, ring_bytes);
  if (ncclResult_t r = segment_->create(); r != ncclSuccess) return r;
  std::set<Token> served{self.process};
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (p.local < 0 || !served.insert(p.info.process).second) continue;
    if (!p.control) return link_failed(q, "cannot share memory with", "it is in this process", 0);
    CtlHeader header{Ctl::Segment, 0, segment_->ring_bytes()};
    if (!send_all(p.control->fd(), &header, sizeof header, deadline_) ||
        !send_fd(p.control->fd(), segment_->fd()))
      return said_before(q, "cannot share memory with", errno);
  }
  return ncclSuccess;
}

ncclResult_t Session::receive_segment(int leader) {
  SocketPtr control = peer(leader).control;
  Stop::During waiting(stop_, [control] { shutdown(control->fd(), SHUT_RDWR); });
  CtlHeader header{Ctl::Segment, 0, 0};
  Fd fd;
  if (recv_all(control->fd(), &header, sizeof header, deadline_))
    fd = header.kind == Ctl::Segment ? recv_fd(control->fd(), deadline_) : Fd();
  int error = stopped() ? ECANCELED : errno;
  if (header.kind == Ctl::Error) return failed_before(leader, "cannot get the shared memory of", header);
  if (!fd) return link_failed(leader, "cannot get the shared memory of", describe_error(error), error);
  uint64_t ring = header.tag;
  if (ring < 512 || ring > ring_bytes || (ring & (ring - 1)))
    return link_failed(leader, "cannot get the shared memory of",
                       "rings of " + std::to_string(ring) + " bytes", 0);
  segment_ = std::make_shared<Segment>(local_count_, size_t(ring));
  return segment_->open(std::move(fd));
}

// A rank of this process cannot have died. It may have sent the reason of its end.
ncclResult_t Session::gone_from_here(int q, const char* doing) {
  attach(self.token);
  hang_up(self.token, q);  // after all frames that it sent
  return cut_off(q, doing, "it has failed or was aborted");
}

// A connection ended during creation: its rank has failed, and may have sent the reason.
ncclResult_t Session::said_before(int q, const char* doing, int error) {
  CtlHeader header;
  if (recv_all(peer(q).control->fd(), &header, sizeof header, after_ms(100)) && header.kind == Ctl::Error)
    return failed_before(q, doing, header);
  return link_failed(q, doing, describe_error(error), error);
}

// A peer's creation failed, and it has sent the reason.
ncclResult_t Session::failed_before(int q, const char* doing, const CtlHeader& header) {
  std::vector<char> body(std::min<size_t>(header.bytes, sizeof(ErrorHead) + kMaxText));
  if (!recv_all(peer(q).control->fd(), body.data(), body.size(), deadline_))
    return link_failed(q, doing, describe_error(errno), errno);
  owner_.sink()->frame(q, header, Blob::of(std::move(body)));
  if (owner_.error() == ncclSuccess) return link_failed(q, doing, "it failed", 0);
  return fail(owner_.error_code(), "rank %d of %d: %s", rank, nranks, owner_.error_text().c_str());
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
    if (stopped()) return link_failed(first, "cannot get the shared memory of", "aborted", 0);
    if (!lives_here(key)) {
      return gone_from_here(first, "cannot get the shared memory of");
    }
    if (Clock::now() >= deadline_)
      return fail(ncclTimeout, "rank %d of %d timed out waiting for the shared memory of rank %d", rank,
                  nranks, first);
    lock.lock();
  }
}

ncclResult_t Session::attach_pipes() {
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank) continue;
    p.link.name = p.str();
    if (p.local < 0) {
      if (!data_ && !(data_ = DataWatch::create()))
        return fail(ncclSystemError, "rank %d of %d: %s", rank, nranks, describe_error(errno).c_str());
      for (auto& pipe : p.link.pipe) data_->add(pipe->socket());
      continue;
    }
    segment_->attach(local_, p.local, &p.link);
    const PeerInfo& i = p.info;
    if (direct_allowed_ && p.same_process)
      p.link.memory = own_memory();
    else if (direct_allowed_ && p.vouched)
      p.link.memory = process_memory({i.pid, i.nonce_addr, {i.nonce[0], i.nonce[1]}});
  }
  if (data_) data_->start(owner_.sink());
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
  if (ncclResult_t r = hear(Tags(size_t(nranks)), everyone(), settings_, &all, "setting up", deadline_);
      r != ncclSuccess)
    return r;
  bool direct = false;
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
    if (!settings_.data[sizeof settings + size_t(q)] || !theirs.data[sizeof settings + size_t(rank)])
      peer(q).link.memory.reset();
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
// end of the connection. A sender may see the end before the service has read the frames before it.
ncclResult_t Session::cut_off(int q, const char* what, const std::string& why) {
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
  return fail(owner_.error_code(), "rank %d of %d: %s", rank, nranks, owner_.error_text().c_str());
}

ncclResult_t Session::exchange(const Tags& tags, const std::vector<int>& ranks, const std::vector<char>& mine,
                               std::vector<Blob>* all, const char* what) {
  Deadline deadline = after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"));
  // A peer could take this for the part in an earlier exchange that it still misses.
  if (owner_.broken(tags[0])) return owner_.say_broken(tags[0]);
  Blob blob = Blob::of(mine);
  ncclResult_t r = say(tags, ranks, blob, what);
  if (r == ncclSuccess) r = hear(tags, ranks, blob, all, what, deadline);
  if (r == ncclSuccess || r == ncclTimeout || stopped()) return r;
  // The others may have all that they need, and wait for this rank.
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i] != rank) send(ranks[i], Ctl::Absent, nullptr, 0, tags[i]);
  return r;
}

ncclResult_t Session::say(const Tags& tags, const std::vector<int>& ranks, const Blob& mine,
                          const char* what) {
  int lost = -1;  // the others do not wait for what was said
  for (size_t i = 0; i < ranks.size(); ++i) {
    int q = ranks[i];
    if (q == rank) continue;
    SocketPtr control;
    bool linked;
    {
      std::lock_guard<std::mutex> lock(mutex);
      control = peer(q).control;
      linked = peer(q).linked && !peer(q).gone;
    }
    if (linked && !control)
      post(peer(q).info.token, rank, Ctl::Exchange, tags[i], mine);
    else if ((!linked || !control->send_frame(Ctl::Exchange, tags[i], mine)) && lost < 0)
      lost = q;
  }
  return lost < 0 ? ncclSuccess : cut_off(lost, what, "it died or left");
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
                           std::vector<Blob>* all, const char* what, Deadline deadline) {
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
  if (ended) return cut_off(missing, what, "it died or left");
  return fail(ncclTimeout, "rank %d of %d: %s timed out waiting for rank %d (%s) (PYNCCL_CPU_INIT_TIMEOUT)",
              rank, nranks, what, missing, peer(missing).str().c_str());
}

}  // namespace pncpu
