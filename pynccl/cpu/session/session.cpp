#include "session/session.hpp"

#include <sched.h>

#include <set>

#include "ops/collectives.hpp"

namespace pncpu {

std::string Peer::str() const { return "pid " + std::to_string(info.pid) + " on " + info.host_name; }

Session::Session(Owner& owner, int device)
    : owner_(owner), device_(device), direct_allowed_(param_int("PYNCCL_CPU_DIRECT") != 0) {
  inline_bytes = size_t(std::max<int64_t>(0, param_int("PYNCCL_CPU_INLINE_BYTES")));
  block_bytes = align_up(size_t(std::max<int64_t>(4096, param_int("PYNCCL_CPU_BLOCK_BYTES"))), 4096);
  ring_bytes = 4096;
  while (ring_bytes < size_t(param_int("PYNCCL_CPU_RING_BYTES"))) ring_bytes *= 2;
}

void Session::set_shape(int rank_, int nranks_) {
  std::lock_guard<std::mutex> lock(mutex);
  rank = rank_;
  nranks = nranks_;
  peers_.clear();
  for (int i = 0; i < nranks; ++i) peers_.push_back(std::make_unique<Peer>());
}

ncclResult_t Session::introduce() {
  if (ncclResult_t r = describe_self(&self); r != ncclSuccess) return r;
  Token secret = Token::random();
  nonce_[0] = self.nonce[0] = secret.a;
  nonce_[1] = self.nonce[1] = secret.b;
  self.nonce_addr = reinterpret_cast<uintptr_t>(nonce_);
  self.device = device_;
  expect(self.token, owner_.sink());
  return ncclSuccess;
}

ncclResult_t Session::join(const Id& id, uint64_t ids_hash, std::vector<PeerInfo>* table) {
  if (id.from_env && rank == 0)
    if (ncclResult_t r = open_env_root(id); r != ncclSuccess) return r;
  if (ncclResult_t r = introduce(); r != ncclSuccess) return r;
  Join mine;
  mine.rank = rank;
  mine.nranks = nranks;
  mine.ids_hash = ids_hash;
  mine.info = self;
  ncclResult_t r = pncpu::join(id, mine, stopped_, &waits_on_, table);
  if (r == ncclSuccess) std::atomic_store(&waits_on_, SocketPtr());
  return r;
}

void Session::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    stopped_.store(true);
  }
  if (SocketPtr socket = std::atomic_load(&waits_on_)) shutdown(socket->fd(), SHUT_RDWR);
  changed.notify_all();
}

ncclResult_t Session::link_failed(int q, const char* doing, const std::string& why) {
  return fail(ncclRemoteError, "rank %d of %d %s rank %d (%s, %s): %s", rank, nranks, doing, q,
              peer(q).str().c_str(), peer(q).info.address.str().c_str(), why.c_str());
}

ncclResult_t Session::connect(const std::vector<PeerInfo>& table) {
  Deadline deadline = after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"));
  std::set<uint64_t> host_ids;
  local_count_ = 0;
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    p.info = table[size_t(q)];
    host_ids.insert(p.info.host);
    hash = hash * 0x100000001b3 ^ p.info.token.a;
    if (p.info.version != kVersion)
      return fail(ncclInvalidUsage, "rank %d uses version %d of this library, rank %d version %d", rank,
                  kVersion, q, p.info.version);
    if (p.info.host != self.host) continue;
    if (q == rank) local_ = local_count_;
    p.local = local_count_++;
    p.same_process = p.info.pid == self.pid;
    p.remote = {p.info.pid, p.info.nonce_addr, {p.info.nonce[0], p.info.nonce[1]}};
  }
  hosts_ = int(host_ids.size());
  choose_patience();
  if (nranks == 1) return ncclSuccess;
  if (ncclResult_t r = open_links(deadline); r != ncclSuccess) return r;
  if (ncclResult_t r = share_segment(deadline); r != ncclSuccess) return r;
  attach_pipes();
  for (int q = 0; q < nranks; ++q)
    if (q != rank) watch_control(peer(q).control, q, owner_.sink());
  return settle(deadline);
}

// Of each pair the higher rank connects.
ncclResult_t Session::open_links(Deadline deadline) {
  for (int q = 0; q < nranks; ++q) {
    if (q == rank) continue;
    Peer& p = peer(q);
    bool local = p.local >= 0;
    HelloKind kinds[] = {HelloKind::Control, HelloKind::CollData, HelloKind::P2pData};
    for (HelloKind kind : kinds) {
      if (local && kind != HelloKind::Control) break;
      SocketPtr socket;
      if (q < rank) {
        std::string why;
        socket = connect_peer(p.info, local, kind, rank, deadline, &why);
        if (!socket) return link_failed(q, "cannot connect to", why);
      } else {
        std::unique_lock<std::mutex> lock(mutex);
        auto key = std::make_pair(int(kind), q);
        changed.wait_until(lock, deadline, [&] { return waiting_.count(key) || stopped(); });
        if (!waiting_.count(key))
          return lock.unlock(), fail(ncclTimeout, "rank %d of %d waited in vain for rank %d (%s) to connect",
                                     rank, nranks, q, p.str().c_str());
        socket = waiting_[key];
        waiting_.erase(key);
      }
      if (kind == HelloKind::Control)
        p.control = socket;
      else
        p.pipe[kind == HelloKind::CollData ? kColl : kP2p].use_tcp(socket);
    }
  }
  return ncclSuccess;
}

ncclResult_t Session::share_segment(Deadline deadline) {
  if (local_count_ < 2) return ncclSuccess;
  int leader = 0;
  while (peer(leader).local != 0) ++leader;
  if (leader == rank) {
    segment_ = std::make_unique<Segment>(local_count_, ring_bytes);
    if (ncclResult_t r = segment_->create(); r != ncclSuccess) return r;
    for (int q = 0; q < nranks; ++q) {
      if (q == rank || peer(q).local < 0) continue;
      uint64_t ring = segment_->ring_bytes();
      if (!send_all(peer(q).control->fd(), &ring, sizeof ring, deadline) ||
          !send_fd(peer(q).control->fd(), segment_->fd()))
        return link_failed(q, "cannot share memory with", strerror(errno));
    }
  } else {
    uint64_t ring = 0;
    int control = peer(leader).control->fd();
    std::atomic_store(&waits_on_, peer(leader).control);
    if (stopped()) return link_failed(leader, "got no memory from", "aborted");
    if (!recv_all(control, &ring, sizeof ring, deadline))
      return link_failed(leader, "got no memory from", strerror(errno));
    Fd fd = recv_fd(control, deadline);
    if (!fd) return link_failed(leader, "got no memory from", strerror(errno));
    std::atomic_store(&waits_on_, SocketPtr());
    segment_ = std::make_unique<Segment>(local_count_, size_t(ring));
    if (ncclResult_t r = segment_->open(std::move(fd)); r != ncclSuccess) return r;
  }
  me_ = &segment_->cell(local_);
  return ncclSuccess;
}

void Session::attach_pipes() {
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank) continue;
    if (p.local < 0) {
      for (Pipe& pipe : p.pipe) watch_data(pipe.socket(), owner_.sink());
      continue;
    }
    p.cell = &segment_->cell(p.local);
    for (int c = 0; c < kChannels; ++c)
      p.pipe[c].use_ring(&segment_->ring(local_, p.local, c), segment_->ring_data(local_, p.local, c),
                         &segment_->ring(p.local, local_, c), segment_->ring_data(p.local, local_, c),
                         segment_->ring_bytes());
  }
}

namespace {
// Whether the kernel lets this process into the peer's memory, shown on the peer's nonce.
bool can_reach(Peer& p) {
  if (p.same_process) return true;
  return read_remote(p.remote, nullptr, 0, 0, true) == RemoteResult::Ok &&
         write_remote(p.remote, p.remote.nonce, p.remote.nonce_addr, sizeof p.remote.nonce) ==
             RemoteResult::Ok;
}
}  // namespace

// Agrees on what must be equal everywhere, and on which pairs read each other's memory.
ncclResult_t Session::settle(Deadline) {
  struct Settings {
    uint64_t inline_bytes, block_bytes;
  };
  std::vector<char> mine(sizeof(Settings) + size_t(nranks));
  inline_bytes = std::min(inline_bytes, (segment_ ? segment_->ring_bytes() : ring_bytes) - sizeof(Header));
  Settings settings{inline_bytes, block_bytes};
  memcpy(mine.data(), &settings, sizeof settings);
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    mine[sizeof(Settings) + size_t(q)] = q != rank && p.local >= 0 && direct_allowed_ && can_reach(p);
  }
  std::vector<int> ranks(static_cast<size_t>(nranks));
  for (int q = 0; q < nranks; ++q) ranks[size_t(q)] = q;
  std::vector<std::vector<char>> all;
  if (ncclResult_t r = exchange(0, ranks, mine, &all, "setting up"); r != ncclSuccess) return r;
  bool direct = false;
  for (int q = 0; q < nranks; ++q) {
    if (all[size_t(q)].size() != mine.size())
      return fail(ncclInternalError, "rank %d settled with %zu bytes", q, all[size_t(q)].size());
    memcpy(&settings, all[size_t(q)].data(), sizeof settings);
    inline_bytes = std::min(inline_bytes, size_t(settings.inline_bytes));
    peer(q).direct = mine[sizeof(Settings) + size_t(q)] && all[size_t(q)][sizeof(Settings) + size_t(rank)];
    direct = direct || peer(q).direct;
  }
  log(Level::Info, "rank %d of %d: %d ranks on this host, %d hosts, %s", rank, nranks, local_count_, hosts_,
      local_count_ < 2 ? "tcp"
      : direct         ? "direct reads"
                       : "shared memory");
  return ncclSuccess;
}

// Ranks that share cores must not make each other wait by spinning. With a core for each, sleeping is what is
// slow: an idle core takes up to 100 us to wake in a virtual machine, more than most of a collective.
void Session::choose_patience() {
  int64_t us = param_int("PYNCCL_CPU_SPIN_US");
  cpu_set_t set;
  int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  bool room = local_count_ <= cpus;
  patience_.spin_ns = patience_.yield_ns = (us >= 0 ? us : room ? 50 : 0) * 1000;
  // Where ranks share cores, a yield may well be followed by a peer's work.
  patience_.interrupted_ns = (us >= 0 ? 0 : room ? 200 : 1000) * 1000;
  underway_patience_ = patience_;
  if (us >= 0) return;
  if (!room) patience_.yield_ns = 20 * 1000;
  underway_patience_.yield_ns = (room ? 2000 : 50) * 1000;
}

// Somebody does not answer in an exchange. That it has left, or has told of an error before it went, explains
// more than the end of the connection, which a sender may see before the service has read what came before
// it.
ncclResult_t Session::cut_off(int q, const char* what, const std::string& why) {
  bool left;
  {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_until(lock, after_ms(1000), [&] { return peer(q).left || owner_.error() != ncclSuccess; });
    left = peer(q).left;
  }
  if (left) owner_.never_ends(q, what);
  if (owner_.error() == ncclSuccess) return link_failed(q, what, why);
  return fail(owner_.error(), "rank %d of %d: %s", rank, nranks, owner_.error_text().c_str());
}

ncclResult_t Session::exchange(uint64_t tag, const std::vector<int>& ranks, const std::vector<char>& mine,
                               std::vector<std::vector<char>>* all, const char* what) {
  Deadline deadline = after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"));
  for (int q : ranks)
    if (q != rank && !peer(q).control->send_frame(Ctl::Exchange, tag, mine.data(), mine.size()))
      return cut_off(q, what, strerror(errno));
  all->clear();
  for (int q : ranks) {
    if (q == rank) {
      all->push_back(mine);
      continue;
    }
    Peer& p = peer(q);
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_until(lock, deadline, [&] { return p.inbox.count(tag) || p.gone || p.left || stopped(); });
    auto it = p.inbox.find(tag);
    if (it == p.inbox.end()) {
      bool gone = p.gone || p.left, stop = stopped();
      lock.unlock();
      if (stop) return fail(ncclInternalError, "rank %d: %s was aborted", rank, what);
      if (gone) return cut_off(q, what, "it died or left");
      return fail(ncclTimeout, "rank %d of %d: %s waited in vain for rank %d (%s) (PYNCCL_CPU_INIT_TIMEOUT)",
                  rank, nranks, what, q, p.str().c_str());
    }
    all->push_back(std::move(it->second));
    p.inbox.erase(it);
  }
  return ncclSuccess;
}

void Session::arrived(const Hello& hello, SocketPtr socket) {
  std::lock_guard<std::mutex> lock(mutex);
  waiting_[{int(hello.kind), hello.rank}] = std::move(socket);
  changed.notify_all();
}

void Session::exchanged(int from, uint64_t tag, std::vector<char> body) {
  std::lock_guard<std::mutex> lock(mutex);
  peer(from).inbox[tag] = std::move(body);
  changed.notify_all();
}

void Session::send(int to, Ctl kind, const void* body, size_t bytes) {
  if (SocketPtr control = peer(to).control; control && !peer(to).gone)
    control->send_frame(kind, 0, body, bytes);
}

void Session::disconnect() {
  forget(self.token);
  for (auto& p : peers_) {
    unwatch(p->control);
    for (Pipe& pipe : p->pipe) {
      unwatch(pipe.socket());
      pipe.close();
    }
    p->control.reset();
  }
}

void Session::drop_connections() {
  for (auto& p : peers_) {
    if (p->control) shutdown(p->control->fd(), SHUT_RDWR);
    for (Pipe& pipe : p->pipe)
      if (pipe.socket()) shutdown(pipe.socket()->fd(), SHUT_RDWR);
  }
  // Shared memory would serve on until the service sees the ends.
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait_until(lock, after_ms(1000), [&] { return nranks == 1 || owner_.error() != ncclSuccess; });
}

}  // namespace pncpu
