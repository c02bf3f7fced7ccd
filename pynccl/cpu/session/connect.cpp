// How a communicator comes to be connected: introductions, sockets between all pairs, the host's shared
// segment.
#include <sched.h>

#include <algorithm>

#include "comm/comm.hpp"

namespace pncpu {

ncclResult_t Comm::introduce() {
  if (ncclResult_t r = describe_self(&self); r != ncclSuccess) return r;
  Token secret = Token::random();
  nonce_[0] = self.nonce[0] = secret.a;
  nonce_[1] = self.nonce[1] = secret.b;
  self.nonce_addr = reinterpret_cast<uintptr_t>(nonce_);
  self.device = device;
  expect(self.token, shared_from_this());
  return ncclSuccess;
}

ncclResult_t Comm::link_failed(int q, const char* doing, const std::string& why) {
  return fail(ncclRemoteError, "rank %d of %d %s rank %d (%s, %s): %s", rank, nranks, doing, q,
              peer(q).str().c_str(), peer(q).info.address.str().c_str(), why.c_str());
}

ncclResult_t Comm::connect(const std::vector<PeerInfo>& table) {
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
  }
  hosts_ = int(host_ids.size());
  choose_patience();
  if (nranks == 1) return ncclSuccess;
  if (ncclResult_t r = open_links(table, deadline); r != ncclSuccess) return r;
  if (ncclResult_t r = share_segment(deadline); r != ncclSuccess) return r;
  attach_pipes();
  for (int q = 0; q < nranks; ++q)
    if (q != rank) watch_control(peer(q).control, q, shared_from_this());
  return settle(deadline);
}

// Of each pair the higher rank connects.
ncclResult_t Comm::open_links(const std::vector<PeerInfo>& table, Deadline deadline) {
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
        socket = connect_peer(table[size_t(q)], local, kind, rank, deadline, &why);
        if (!socket) return link_failed(q, "cannot connect to", why);
      } else {
        std::unique_lock<std::mutex> lock(mutex);
        auto key = std::make_pair(int(kind), q);
        changed.wait_until(lock, deadline, [&] { return waiting_.count(key) || aborted.load(); });
        if (!waiting_.count(key))
          return lock.unlock(), fail(ncclTimeout, "rank %d of %d waited in vain for rank %d (%s) to connect",
                                     rank, nranks, q, p.str().c_str());
        socket = waiting_[key];
        waiting_.erase(key);
      }
      if (kind == HelloKind::Control)
        p.control = socket;
      else
        p.link.pipe[kind == HelloKind::CollData ? kColl : kP2p] = tcp_pipe(socket);
    }
  }
  return ncclSuccess;
}

ncclResult_t Comm::share_segment(Deadline deadline) {
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
    std::atomic_store(&join_socket, peer(leader).control);
    if (aborted.load()) return link_failed(leader, "got no memory from", "aborted");
    if (!recv_all(control, &ring, sizeof ring, deadline))
      return link_failed(leader, "got no memory from", strerror(errno));
    Fd fd = recv_fd(control, deadline);
    if (!fd) return link_failed(leader, "got no memory from", strerror(errno));
    std::atomic_store(&join_socket, SocketPtr());
    segment_ = std::make_unique<Segment>(local_count_, size_t(ring));
    if (ncclResult_t r = segment_->open(std::move(fd)); r != ncclSuccess) return r;
  }
  me_ = &segment_->cell(local_);
  return ncclSuccess;
}

void Comm::attach_pipes() {
  for (int q = 0; q < nranks; ++q) {
    Peer& p = peer(q);
    if (q == rank) continue;
    p.link.name = p.str();
    if (p.local < 0) {
      for (auto& pipe : p.link.pipe) watch_data(pipe->socket(), shared_from_this());
      continue;
    }
    segment_->attach(local_, p.local, &p.link);
    const PeerInfo& i = p.info;
    if (direct_allowed_)
      p.link.memory =
          p.same_process ? own_memory() : process_memory({i.pid, i.nonce_addr, {i.nonce[0], i.nonce[1]}});
  }
}

// Agrees on what must be equal everywhere, and on which pairs read each other's memory.
ncclResult_t Comm::settle(Deadline) {
  struct Settings {
    uint64_t inline_bytes, block_bytes;
  };
  std::vector<char> mine(sizeof(Settings) + size_t(nranks));
  inline_bytes = std::min(inline_bytes, (segment_ ? segment_->ring_bytes() : ring_bytes) - sizeof(Header));
  Settings settings{inline_bytes, block_bytes};
  memcpy(mine.data(), &settings, sizeof settings);
  for (int q = 0; q < nranks; ++q) {
    Memory* memory = peer(q).link.memory.get();
    mine[sizeof(Settings) + size_t(q)] = memory && memory->works();
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
    if (!mine[sizeof(Settings) + size_t(q)] || !all[size_t(q)][sizeof(Settings) + size_t(rank)])
      peer(q).link.memory.reset();
    direct = direct || peer(q).link.direct();
  }
  log(Level::Info, "rank %d of %d: %d ranks on this host, %d hosts, %s", rank, nranks, local_count_, hosts_,
      local_count_ < 2 ? "tcp"
      : direct         ? "direct reads"
                       : "shared memory");
  return ncclSuccess;
}

// Ranks that share cores must not make each other wait by spinning. With a core for each, sleeping is what is
// slow: an idle core takes up to 100 us to wake in a virtual machine, more than most of a collective.
void Comm::choose_patience() {
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
ncclResult_t Comm::cut_off(int q, const char* what, const std::string& why) {
  bool left;
  {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_until(lock, after_ms(1000), [&] { return peer(q).left || error() != ncclSuccess; });
    left = peer(q).left;
  }
  if (left) never(q, what);
  if (error() == ncclSuccess) return link_failed(q, what, why);
  return fail(error(), "rank %d of %d: %s", rank, nranks, error_text().c_str());
}

ncclResult_t Comm::exchange(uint64_t tag, const std::vector<int>& ranks, const std::vector<char>& mine,
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
    changed.wait_until(lock, deadline,
                       [&] { return p.inbox.count(tag) || p.gone || p.left || aborted.load(); });
    auto it = p.inbox.find(tag);
    if (it == p.inbox.end()) {
      bool gone = p.gone || p.left, stop = aborted.load();
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

}  // namespace pncpu
