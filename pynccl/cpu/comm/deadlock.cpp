#include <algorithm>

#include "comm/comm.hpp"

// Deadlocks are found while a rank is blocked, from what the ranks tell each other then.
//
// A batch (the calls of one group on one communicator) ends only when all of it has, and the next begins
// after it. So a rank that needs of a peer what the peer's current batch does not contain waits for that
// batch to end: an edge. A cycle of edges never ends, provided that all its ranks are blocked at the same
// time, in the batches that the edges speak of. That was so when the cycle was first seen if each of them
// later says that it has not moved since before.

namespace pncpu {

std::string Comm::waiting_for(const Batch& batch) {
  bool coll = batch.at < batch.colls.size();
  std::string text = "rank " + std::to_string(rank) + " waits in " + (coll ? coll_.str() : p2p_.str());
  std::vector<int> missing = coll ? coll_.missing() : std::vector<int>();
  for (size_t i = 0; i < missing.size(); ++i)
    text += (i ? ", " : missing.size() > 1 ? " for ranks " : " for rank ") + std::to_string(missing[i]);
  return text;
}

void Comm::never_ends(int q, const std::string& doing) {
  mismatch("rank " + std::to_string(rank) + " waits in " + doing + " for rank " + std::to_string(q) +
           ", which has finalized or destroyed its communicator without a matching call");
}

void Comm::look_for_deadlock(const Batch& batch) {
  bool coll = batch.at < batch.colls.size();
  std::vector<int> missing = coll ? coll_.missing() : std::vector<int>();
  std::string doing = coll ? coll_.str() : p2p_.str();
  Stuck mine;
  mine.epoch = epoch_;
  mine.serial = ++serial_;
  mine.last_coll = coll_seq_ + (coll ? batch.colls.size() - batch.at - 1 : 0);
  snprintf(mine.doing, sizeof mine.doing, "%s", doing.c_str());
  for (int q = 0; q < nranks; ++q) {
    if (q == rank) continue;
    uint64_t needs_coll = std::count(missing.begin(), missing.end(), q) ? coll_.seq() : 0;
    uint64_t needs_recv = p2p_.front_send(q).number, needs_send = p2p_.front_recv(q).number;
    std::unique_lock<std::mutex> lock(session.mutex);
    Peer& p = peer(q);
    if (p.left &&
        (needs_coll > p.leaving.colls || needs_recv > p.leaving.recvs || needs_send > p.leaving.sends)) {
      lock.unlock();
      never_ends(q, doing);
      return;
    }
    if (p.stuck && (needs_coll > p.stuck->last_coll || needs_recv > p.stuck->last_recv ||
                    needs_send > p.stuck->last_send))
      if (mine.edges < Stuck::kMostEdges) mine.waits_for[mine.edges++] = {q, p.stuck->epoch};
  }
  for (int q = 0; q < nranks; ++q) {
    if (q == rank || !session.linked(q)) continue;
    mine.last_send = p2p_.last_send(q);
    mine.last_recv = p2p_.last_recv(q);
    session.send(q, Ctl::Stuck, &mine, sizeof mine);
  }
  std::vector<int> cycle = find_cycle(mine);
  std::map<int, std::pair<uint64_t, uint64_t>> suspects;
  bool confirmed = !cycle.empty();
  std::string text = "deadlock:";
  std::unique_lock<std::mutex> lock(session.mutex);
  for (int q : cycle) {
    const Stuck& s = q == rank ? mine : *peer(q).stuck;
    auto before = suspects_.find(q);
    confirmed = confirmed && before != suspects_.end() && before->second.first == s.epoch &&
                before->second.second < s.serial;
    suspects[q] = before != suspects_.end() && before->second.first == s.epoch
                      ? before->second
                      : std::make_pair(s.epoch, s.serial);
    text += (text.back() == ':' ? " rank " : ", rank ") + std::to_string(q) + " waits in " + s.doing;
  }
  lock.unlock();
  suspects_ = suspects;
  if (confirmed) mismatch(text + ": each for calls that the next has not made");
}

// A way along edges from this rank back to itself.
std::vector<int> Comm::find_cycle(const Stuck& mine) {
  std::lock_guard<std::mutex> lock(session.mutex);
  std::vector<int> from(size_t(nranks), -1), todo { rank };
  while (!todo.empty()) {
    int at = todo.back();
    todo.pop_back();
    const Stuck* s = at == rank ? &mine : peer(at).stuck.get();
    for (int i = 0; s && i < std::min(s->edges, Stuck::kMostEdges); ++i) {
      int q = s->waits_for[i].rank;
      if (q < 0 || q >= nranks) continue;
      const Stuck* other = q == rank ? &mine : peer(q).stuck.get();
      if (!other || other->epoch != s->waits_for[i].epoch) continue;  // it has moved since
      if (q == rank) {
        std::vector<int> cycle{at};
        while (at != rank) cycle.push_back(at = from[size_t(at)]);
        std::reverse(cycle.begin(), cycle.end());
        return cycle;
      }
      if (from[size_t(q)] >= 0) continue;
      from[size_t(q)] = at;
      todo.push_back(q);
    }
  }
  return {};
}

}  // namespace pncpu
