#include "service/root.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

namespace pncpu {
namespace {

std::string who(const Join& j) {
  return "rank " + std::to_string(j.rank) + " (pid " + std::to_string(j.info.pid) + " on " +
         j.info.host_name + ")";
}

}  // namespace

void RootTable::open(const Token& token, bool reusable) { roots_[token].reusable = reusable; }

void RootTable::answer(const SocketPtr& socket, ncclResult_t result, const void* body, size_t bytes) {
  JoinReply reply{result, uint32_t(bytes)};
  Deadline deadline = after_ms(5000);
  if (send_all(socket->fd(), &reply, sizeof reply, deadline)) send_all(socket->fd(), body, bytes, deadline);
  shutdown(socket->fd(), SHUT_WR);
}

void RootTable::end(Root& root, ncclResult_t result, const std::string& text) {
  for (auto& m : root.members) answer(m.socket, result, text.data(), text.size());
  root.members.clear();
  root.deadline = kForever;
  if (!root.reusable) {
    root.over = text;
    root.over_code = result;
  }
}

void RootTable::complete(Root& root) {
  std::vector<PeerInfo> table(root.members.size());
  for (auto& m : root.members) table[size_t(m.join.rank)] = m.join.info;
  for (auto& m : root.members) answer(m.socket, ncclSuccess, table.data(), table.size() * sizeof(PeerInfo));
  const Join& first = root.members[0].join;
  if (!root.reusable) {
    root.over = "this unique id has been used already, for a communicator of " +
                std::to_string(table.size()) + " ranks that " + who(first) +
                " joined first: an id makes one communicator";
    root.over_code = ncclInvalidUsage;
  }
  root.members.clear();
  root.deadline = kForever;
}

bool RootTable::joined(const Token& token, const Join& join, const SocketPtr& socket) {
  Root& root = roots_[token];
  if (!root.over.empty()) return answer(socket, root.over_code, root.over.data(), root.over.size()), true;
  if (root.members.empty()) root.deadline = after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"));
  root.members.push_back({join, socket});
  const Join& first = root.members[0].join;
  auto refuse = [&](const std::string& text) { return end(root, ncclInvalidArgument, text), true; };
  if (join.nranks != first.nranks)
    return refuse(who(join) + " joined a communicator of " + std::to_string(join.nranks) + " ranks, " +
                  who(first) + " one of " + std::to_string(first.nranks));
  if (join.ids_hash != first.ids_hash)
    return refuse(who(join) + " and " + who(first) + " passed different lists of unique ids");
  if (join.rank < 0 || join.rank >= join.nranks)
    return refuse(who(join) + " is out of range for " + std::to_string(join.nranks) + " ranks");
  for (size_t i = 0; i + 1 < root.members.size(); ++i)
    if (root.members[i].join.rank == join.rank)
      return refuse("rank " + std::to_string(join.rank) + " was taken twice: by pid " +
                    std::to_string(root.members[i].join.info.pid) + " on " +
                    root.members[i].join.info.host_name + " and by pid " + std::to_string(join.info.pid) +
                    " on " + join.info.host_name);
  if (int(root.members.size()) == join.nranks) complete(root);
  return true;
}

void RootTable::left(const Token& token, const SocketPtr& socket) {
  auto it = roots_.find(token);
  if (it == roots_.end()) return;
  for (auto& m : it->second.members) {
    if (m.socket != socket) continue;
    std::string text = who(m.join) + " died or left before all ranks had joined";
    return end(it->second, ncclRemoteError, text);
  }
}

bool RootTable::waits(const Token& token, const SocketPtr& socket) const {
  auto it = roots_.find(token);
  if (it == roots_.end()) return false;
  for (auto& m : it->second.members)
    if (m.socket == socket) return true;
  return false;
}

void RootTable::expire(Deadline now) {
  for (auto& [token, root] : roots_) {
    if (root.deadline > now) continue;
    int nranks = root.members[0].join.nranks;
    std::set<int> missing;
    for (int r = 0; r < nranks; ++r) missing.insert(r);
    for (auto& m : root.members) missing.erase(m.join.rank);
    std::string text = "timed out after " + std::to_string(param_seconds("PYNCCL_CPU_INIT_TIMEOUT")) +
                       " s (PYNCCL_CPU_INIT_TIMEOUT): " + std::to_string(root.members.size()) + " of " +
                       std::to_string(nranks) + " ranks joined, missing rank" +
                       (missing.size() > 1 ? "s" : "");
    for (int r : missing) text += (r == *missing.begin() ? " " : ", ") + std::to_string(r);
    end(root, ncclTimeout, text);
  }
}

Address Id::address() const {
  Address a;
  if (family == AF_INET) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    memcpy(&in.sin_addr, ip, 4);
    memcpy(&a.ss, &in, sizeof in);
    a.len = sizeof in;
  } else {
    sockaddr_in6 in{};
    in.sin6_family = AF_INET6;
    in.sin6_scope_id = scope;
    memcpy(&in.sin6_addr, ip, 16);
    memcpy(&a.ss, &in, sizeof in);
    a.len = sizeof in;
  }
  a.set_port(port);
  return a;
}

void Id::set_address(const Address& a) {
  family = a.ss.ss_family;
  port = uint16_t(a.port());
  if (family == AF_INET) {
    memcpy(ip, &reinterpret_cast<const sockaddr_in*>(&a.ss)->sin_addr, 4);
  } else {
    auto* in = reinterpret_cast<const sockaddr_in6*>(&a.ss);
    memcpy(ip, &in->sin6_addr, 16);
    scope = in->sin6_scope_id;
  }
}

ncclResult_t join(const Id& id, const Join& mine, const std::atomic<bool>& stop, SocketPtr* waits_on,
                  std::vector<PeerInfo>* table) {
  double seconds = param_seconds("PYNCCL_CPU_INIT_TIMEOUT");
  std::string why, at = id.address().str();
  // The maker of an id listens before the id exists; only NCCL_COMM_ID's rank 0 may come late.
  Deadline connect_by = after_seconds(id.from_env ? seconds : std::min(seconds, 5.0));
  Fd fd = connect_to(id.address(), connect_by, &why, true, &stop);
  if (!fd)
    return fail(
        id.from_env ? ncclTimeout : ncclSystemError,
        "rank %d cannot reach the root of the unique id at %s (%s): its maker has exited, or another network "
        "interface is needed (NCCL_SOCKET_IFNAME)",
        mine.rank, at.c_str(), why.c_str());
  SocketPtr socket = std::make_shared<Socket>(std::move(fd));
  std::atomic_store(waits_on, socket);
  if (stop.load())
    return fail(ncclInternalError, "rank %d of %d: the rendezvous was aborted", mine.rank, mine.nranks);
  int to = socket->fd();
  Hello hello;
  hello.token = id.token;
  hello.rank = mine.rank;
  // The root's own time-out names the missing ranks, so it goes first.
  Deadline deadline = after_seconds(seconds + 5);
  JoinReply reply;
  if (!send_all(to, &hello, sizeof hello, deadline) || !send_all(to, &mine, sizeof mine, deadline) ||
      !recv_all(to, &reply, sizeof reply, deadline))
    return fail(errno == ETIMEDOUT ? ncclTimeout : ncclRemoteError,
                "rank %d of %d: the root of the unique id at %s went away during the rendezvous (%s)",
                mine.rank, mine.nranks, at.c_str(), strerror(errno));
  std::vector<char> body(std::min<size_t>(reply.bytes, kMaxFrame));
  if (!recv_all(to, body.data(), body.size(), deadline))
    return fail(ncclRemoteError, "rank %d of %d: the root's answer was cut short (%s)", mine.rank,
                mine.nranks, strerror(errno));
  if (reply.result != ncclSuccess)
    return fail(ncclResult_t(reply.result), "rank %d of %d: %.*s", mine.rank, mine.nranks, int(body.size()),
                body.data());
  if (body.size() != size_t(mine.nranks) * sizeof(PeerInfo))
    return fail(ncclInternalError, "the root's table has %zu bytes", body.size());
  table->resize(size_t(mine.nranks));
  memcpy(static_cast<void*>(table->data()), body.data(), body.size());
  return ncclSuccess;
}

}  // namespace pncpu
