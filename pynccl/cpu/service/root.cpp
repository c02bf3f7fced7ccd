#include "service/root.hpp"

#include <sys/resource.h>

namespace pncpu {
namespace {

template <class T>
bool read_as(const Blob& body, T* out) {
  if (body.size != sizeof(T)) return false;
  memcpy(static_cast<void*>(out), body.data, sizeof(T));
  return true;
}

// Replaces unprintable characters of an unauthenticated peer.
template <size_t N>
void clean(char (&name)[N]) {
  name[N - 1] = 0;
  for (char& c : name)
    if (c && (c < ' ' || c > '~')) c = '?';
}

constexpr char kStopped[] =
    "the process that made the unique id did not respond until the time-out had passed: it was stopped, or "
    "its "
    "machine is overloaded";

// Unauthenticated ranks may use this part of the process's descriptors.
size_t most_public_seats() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return size_t(std::max<rlim_t>(limit.rlim_cur / 4, 16));
}

std::string shown(double seconds) {
  char text[32];
  snprintf(text, sizeof text, "%.3g", seconds);
  return text;
}

// The free ones of `count` seats from `first`.
LateRanks free_seats(const std::map<int, size_t>& seats, int first, int count) {
  LateRanks late;
  auto taken = seats.begin();
  for (int seat = first; seat < first + count && late.count < LateRanks::kMost; ++seat) {
    if (taken != seats.end() && taken->first == seat)
      ++taken;
    else
      late.add(seat);
  }
  return late;
}

// "missing rank 3", "missing ranks 1, 2, ... and 99 more".
std::string missing(const LateRanks& late, int free) {
  std::string text = free == 1 ? "missing rank" : "missing ranks";
  for (int i = 0; i < late.count; ++i) text += (i ? ", " : " ") + std::to_string(late.ranks[i]);
  return free > late.count ? text + " and " + std::to_string(free - late.count) + " more" : text;
}

}  // namespace

void RootTable::Round::clear() {
  for (Member& m : members) m.seat->close();
  members.clear();
  seats.clear();
  introduced = 0;
}

bool RootTable::serves(const Token& token, uint64_t serial) const {
  return serial ? ids.mine(token, serial) : public_.count(token) != 0;
}

bool RootTable::open_to_all(const Token& token) const {
  auto it = public_.find(token);
  return it != public_.end() && it->second.open_to_all;
}

std::string RootTable::who(const Root& root, const Member& member) const {
  const Announce& a = member.announce;
  std::string rank = "rank " + std::to_string(a.rank);
  if (open_to_all(root.token))  // unauthenticated peers get no pids
    return rank + " (on " + a.host_name + ", " + member.seat->address() + ")";
  return rank + " (pid " + std::to_string(a.pid) + " on " + a.host_name + ")";
}

void RootTable::set_deadline(Root& root, Deadline deadline) {
  timers_.erase({root.deadline, root.token});
  root.deadline = deadline;
  if (deadline != kForever) timers_.insert({deadline, root.token});
}

// The rank with the shortest time-out ends the rendezvous for all.
void RootTable::wait_at_most(Root& root, const Announce& a) {
  double most = param_seconds("PYNCCL_CPU_INIT_TIMEOUT");
  // NaN is not positive.
  bool sooner = a.seconds > 0 && a.seconds < most && !open_to_all(root.token);
  double seconds = sooner ? a.seconds : most;
  Deadline deadline = after_seconds(seconds + (a.share >= 0 ? 2 : 0));
  if (deadline >= root.deadline) return;
  root.seconds = seconds;
  set_deadline(root, deadline);
}

void RootTable::erase(Root& root) {
  root.ranks.clear();
  root.shares.clear();
  set_deadline(root, kForever);
  roots_.erase(Token(root.token));
}

void RootTable::end(Root& root, const Failure& failure) {
  Blob body = failure.body();
  // The first rank of a share also tells the root of the first id.
  for (Round* round : {&root.ranks, &root.shares})
    for (Member& m : round->members)
      m.seat->tell(Ctl::Failed, uint64_t(failure.result) | uint64_t(&m == root.ranks.members.data()) << 32,
                   body);
  Failure later = failure;
  // A rank that joins after this reads a text that may name that rank as missing.
  if (failure.result == ncclTimeout)
    later.text = "this rank joined too late, and needs a new unique id: " + failure.text;
  if (root.serial) ids.done(root.serial, later);
  erase(root);
}

void RootTable::complete(Root& root, const Table& table) {
  for (Member& m : root.ranks.members) m.seat->tell(Ctl::Table, 0, table.bytes);
  if (root.serial)
    ids.done(root.serial,
             {ncclInvalidUsage,
              "this unique id has been used already, for a communicator of " + std::to_string(table.size()) +
                  " ranks that " + who(root, root.ranks.members[0]) +
                  " joined first: an id makes one communicator",
              {}});
  if (open_to_all(root.token) && root.ranks.members.size() <= kMostRemembered)
    for (Member& m : root.ranks.members) public_[root.token].before[m.announce.rank] = m.announce;
  erase(root);
}

// Logs that another process takes a rank: one of the two may not belong to the job.
void RootTable::note_change(const Root& root, const Member& member) {
  const Announce& a = member.announce;
  auto& before = public_[root.token].before;
  auto it = before.find(a.rank);
  if (it == before.end() || (it->second.pid == a.pid && !strcmp(it->second.host_name, a.host_name))) return;
  log(Level::Warn,
      "rank %d of the communicator that NCCL_COMM_ID made before was pid %lld on %s; now pid %lld on %s (%s) "
      "takes this place, and without PYNCCL_SECRET either may be a stranger",
      a.rank, static_cast<long long>(it->second.pid), it->second.host_name, static_cast<long long>(a.pid),
      a.host_name, member.seat->address().c_str());
  before.erase(it);
}

RootTable::Member* RootTable::find(Round& round, const SeatPtr& seat) {
  for (Member& m : round.members)
    if (m.seat == seat) return &m;
  return nullptr;
}

uint32_t RootTable::most_bytes(Ctl kind) {
  switch (kind) {
    case Ctl::Announce:
      return sizeof(Announce);
    case Ctl::Introduce:
      return sizeof(PeerInfo);
    case Ctl::Share:
    case Ctl::Table:
      return kMaxFrame;
    case Ctl::Failed:
      return Failure::kMostBytes;
    default:
      return 0;
  }
}

bool RootTable::heard(const Token& token, uint64_t serial, const SeatPtr& seat, const CtlHeader& header,
                      const Blob& body) {
  if (header.kind == Ctl::Announce) {
    Announce announce;
    if (!read_as(body, &announce)) return false;
    clean(announce.host_name);
    Failure end;
    if (serial && ids.is_done(serial, &end)) {
      seat->tell(Ctl::Failed, uint64_t(end.result), end.body());
      return seat->close(), true;
    }
    Root& root = roots_[token];
    root.token = token;
    root.serial = serial;
    return announced(root, seat, announce);
  }
  auto it = roots_.find(token);
  // A rank whose own root has failed reports it to the root of the first id.
  if (header.kind == Ctl::Failed && !open_to_all(token))
    return reported(token, serial, Failure::of(header.tag, body));
  if (it == roots_.end()) return false;
  Root& root = it->second;
  PeerInfo info;
  switch (header.kind) {
    case Ctl::Introduce:
      return read_as(body, &info) && introduced(root, seat, info);
    case Ctl::Share:
      return brought(root, seat, body);
    case Ctl::Table:
      return find(root.ranks, seat) && relayed(root, body);
    default:
      return false;
  }
}

bool RootTable::announced(Root& root, const SeatPtr& seat, const Announce& a) {
  bool strangers = open_to_all(root.token), of_share = a.share >= 0;
  Round& round = of_share ? root.shares : root.ranks;
  Member member{a, seat, false, {}, {}};
  auto answer = [&](const std::string& text) {
    seat->tell(Ctl::Failed, ncclInvalidArgument, Blob::copy(text.data(), text.size()));
    seat->close();
  };
  auto turn_away = [&](const std::string& text) {  // the other ranks continue to wait
    answer(text);
    if (root.ranks.members.empty() && root.shares.members.empty() && !root.refused) erase(root);
    return true;
  };
  auto refuse = [&](const std::string& text) {
    answer(text);
    return end(root, {ncclInvalidArgument, text, {}}), true;
  };
  if (a.nranks < 1 || a.nranks > kMostRanks || a.nids < 1 || a.nids > a.nranks || a.share >= a.nids ||
      (strangers && a.nids > 1))
    return turn_away("a communicator of " + std::to_string(a.nranks) + " ranks, expected 1 to " +
                     std::to_string(kMostRanks));
  wait_at_most(root, a);
  const Member& first = root.ranks.members.empty()
                            ? root.shares.members.empty() ? member : root.shares.members[0]
                            : root.ranks.members[0];
  if (a.nranks != first.announce.nranks)
    return refuse(who(root, member) + " joined a communicator of " + std::to_string(a.nranks) + " ranks, " +
                  who(root, first) + " one of " + std::to_string(first.announce.nranks));
  if (a.ids_hash != first.announce.ids_hash || a.nids != first.announce.nids)
    return refuse(who(root, member) + " and " + who(root, first) + " passed different lists of unique ids");
  if (a.rank < 0 || a.rank >= a.nranks) {
    std::string text = who(root, member) + " is out of range for " + std::to_string(a.nranks) + " ranks";
    return strangers ? turn_away(text) : refuse(text);
  }
  Shares shares{a.nranks, a.nids};
  int share = shares.of_rank(a.rank);
  bool elsewhere =
      of_share ? a.share != share
               : !root.ranks.members.empty() && shares.of_rank(root.ranks.members[0].announce.rank) != share;
  if (elsewhere)
    return refuse(who(root, member) + " and " + who(root, first) + " passed different lists of unique ids");
  auto taken = round.seats.find(of_share ? a.share : a.rank);
  if (taken != round.seats.end()) {
    const Member& other = round.members[taken->second];
    auto by = [&](const Member& m) {
      return strangers ? std::string(m.announce.host_name) + " (" + m.seat->address() + ")"
                       : "pid " + std::to_string(m.announce.pid) + " on " + m.announce.host_name;
    };
    return refuse("rank " + std::to_string(a.rank) + " was taken twice: by " + by(other) + " and by " +
                  by(member));
  }
  if (strangers && !round.seats.count(0) && a.rank != 0 && round.members.size() >= most_public_seats())
    return turn_away("too many ranks wait for rank 0");
  if (strangers) note_change(root, member);
  // A seat has a member, also without memory.
  size_t count = round.members.size();
  if (count == round.members.capacity()) round.members.reserve(2 * count + 4);
  round.seats[of_share ? a.share : a.rank] = count;
  round.members.push_back(std::move(member));
  if (of_share) return true;
  int wanted = shares.count(share);
  if (int(round.members.size()) < wanted) return true;
  // Ranks that joined just before the time-out need time for the second phase.
  if (root.deadline < after_ms(1000)) set_deadline(root, after_ms(5000));
  for (Member& m : round.members) m.seat->tell(Ctl::Gathered, 0, {});
  return true;
}

bool RootTable::introduced(Root& root, const SeatPtr& seat, const PeerInfo& info) {
  Round& round = root.ranks;
  Member* member = find(round, seat);
  if (!member || member->introduced) return false;
  member->introduced = true;
  member->info = info;
  clean(member->info.host_name);
  const Announce& first = round.members[0].announce;
  Shares shares{first.nranks, first.nids};
  int share = shares.of_rank(first.rank);
  int wanted = shares.count(share);
  if (++round.introduced < size_t(wanted)) return true;
  std::vector<PeerInfo> infos(round.members.size());
  for (auto& [rank, at] : round.seats)
    infos[size_t(rank - round.seats.begin()->first)] = round.members[at].info;
  Table table = Table::of(std::move(infos));
  if (first.nids == 1) return complete(root, table), true;
  set_deadline(root, after_seconds(param_seconds("PYNCCL_CPU_INIT_TIMEOUT") + 5));
  round.members[round.seats.begin()->second].seat->tell(Ctl::Share, 0, table.bytes);
  return true;
}

bool RootTable::brought(Root& root, const SeatPtr& seat, const Blob& share) {
  Round& round = root.shares;
  Member* member = find(round, seat);
  if (!member || member->introduced) return false;
  const Announce& a = member->announce;
  Shares shares{a.nranks, a.nids};
  if (share.size != size_t(shares.count(a.share)) * sizeof(PeerInfo)) return false;
  member->introduced = true;
  member->share = share;
  if (++round.introduced < size_t(a.nids)) return true;
  std::vector<char> all;
  for (auto& [number, at] : round.seats) {
    const Blob& part = round.members[at].share;
    all.insert(all.end(), part.data, part.data + part.size);
  }
  Blob table = Blob::of(std::move(all));
  for (Member& m : round.members) m.seat->tell(Ctl::Table, 0, table);
  return round.clear(), true;
}

bool RootTable::relayed(Root& root, const Blob& table) {
  if (table.size != size_t(root.ranks.members[0].announce.nranks) * sizeof(PeerInfo)) return false;
  return complete(root, {table}), true;
}

bool RootTable::reported(const Token& token, uint64_t serial, const Failure& failure) {
  Failure over;
  if (!serial || ids.is_done(serial, &over)) return false;
  Root& root = roots_[token];
  root.token = token;
  root.serial = serial;
  end(root, failure);
  return false;
}

// Without memory the other ranks get the error at the deadline.
void RootTable::left(const Token& token, const SeatPtr& seat) noexcept {
  auto it = roots_.find(token);
  if (it == roots_.end()) return;
  Root& root = it->second;
  Member* member = find(root.ranks, seat);
  if (!member) member = find(root.shares, seat);
  if (!member) return;
  try {
    LateRanks who_left;
    who_left.add(member->announce.rank);
    end(root, {ncclRemoteError,
               who(root, *member) + " died or left before all ranks had joined: " + joined(root), who_left});
  } catch (const std::bad_alloc&) {
    log(Level::Warn, "the bootstrap service has no memory to tell that a rank left");
  }
}

void RootTable::unproved(const Token& token, uint64_t serial, const std::string& text) {
  Failure over;
  if (serial && ids.is_done(serial, &over)) return;
  Root& root = roots_[token];
  root.token = token;
  root.serial = serial;
  if (serial) return end(root, {ncclInvalidUsage, text, {}});
  ++root.refused;
  root.last_refused = text;
}

Failure RootTable::late(const Root& root) const {
  bool by_default = root.seconds == param_seconds("PYNCCL_CPU_INIT_TIMEOUT");
  Failure failure{ncclTimeout, "timed out after " + shown(root.seconds) + " s", {}};
  failure.text += (by_default ? " (PYNCCL_CPU_INIT_TIMEOUT): " : ": ") + joined(root, &failure.late);
  return failure;
}

// Which ranks have come, and which are missing.
std::string RootTable::joined(const Root& root, LateRanks* late) const {
  LateRanks ignored;
  if (!late) late = &ignored;
  std::string text;
  const Round &ranks = root.ranks, &shares = root.shares;
  if (ranks.members.empty() && shares.members.empty()) return "there was no memory for its ranks";
  const Announce& a = (ranks.members.empty() ? shares : ranks).members[0].announce;
  Shares spread{a.nranks, a.nids};
  int share = spread.of_rank(a.rank), first = spread.first(share), wanted = spread.count(share);
  if (ranks.members.empty()) share = 0, first = 0, wanted = spread.count(0);
  std::string at = a.nids == 1 ? "" : " that meet at unique id " + std::to_string(share);
  int free = wanted - int(ranks.members.size());
  if (free > 0) {
    *late = free_seats(ranks.seats, first, wanted);
    text += std::to_string(ranks.members.size()) + " of " + std::to_string(wanted) + " ranks" + at +
            " joined, " + missing(*late, free);
  } else if (ranks.introduced < ranks.members.size()) {
    for (const Member& m : ranks.members) {
      if (m.introduced) continue;
      late->add(m.announce.rank);
      return text + who(root, m) + " joined, but has not answered since";
    }
  } else {
    text += "not all ranks" + std::string(" have joined that meet at the other unique ids");
    for (int other = 0; share == 0 && other < a.nids; ++other)
      if (!shares.seats.count(other))
        return text + ": ranks " + std::to_string(spread.first(other)) + " to " +
               std::to_string(spread.first(other) + spread.count(other) - 1) + " at id " +
               std::to_string(other);
  }
  if (root.refused)
    text += "; " + std::to_string(root.refused) + " connections were refused, the last: " + root.last_refused;
  return text;
}

void RootTable::expire(Deadline now) {
  while (!timers_.empty() && timers_.begin()->first <= now) {
    Root& root = roots_.at(timers_.begin()->second);
    // Ranks may have come that this process has not heard.
    const bool stopped = now - root.deadline > std::chrono::seconds(1);
    end(root, stopped ? Failure{ncclTimeout, kStopped, {}} : late(root));
  }
}

void RootTable::shut(const std::string& why) {
  while (!timers_.empty())
    end(roots_.at(timers_.begin()->second),
        {ncclSystemError,
         "no rank can connect to the root of the unique id (pid " + std::to_string(getpid()) + " on " +
             host_name() + "): " + why,
         {}});
}

}  // namespace pncpu
