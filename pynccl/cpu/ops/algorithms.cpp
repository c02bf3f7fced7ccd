#include "ops/algorithms.hpp"

#include <algorithm>

#include "ops/across_hosts.hpp"
#include "ops/places.hpp"

// Rules for every algorithm:
// - Inputs are reduced in rank order, or in that of the hosts, and each element is computed once, or by every
//   rank in the same way. So the bits of a result depend neither on timing nor on the connections.
// - A rank that ends its schedule may change its buffers. So a rank that accesses a peer's buffers directly
//   notifies the peer when it has finished (kDone), and the peer waits for this.
// - A pipe delivers bytes in order: of two actions on one pipe in one direction, the later one is `after` the
//   earlier one.

namespace pncpu {
namespace {

Part part(const Call& c, int from, int to) { return part_for(c.func, c.root, c.bytes(), from, to); }

// Where the part of rank `from` goes in the receive buffer.
size_t slot(const Call& c, int from) {
  bool one_each = c.func == Func::AllGather || c.func == Func::AlltoAll || c.func == Func::Gather;
  return one_each ? size_t(from) * c.stride : 0;
}

// Where a part begins in the send buffer of this rank.
size_t place(const Call& c, Part part) { return part.offset == 0 ? 0 : part.offset / c.bytes() * c.stride; }

// Visits the peers; each rank begins with another one.
template <class F>
void each_peer(const Call& c, F&& visit) {
  for (int i = 1; i < c.nranks; ++i) visit((c.rank + i) % c.nranks);
}

// All data is here already.
void local(const Call& c, Schedule* s) {
  auto input = [&](int p, Part in) { return p == c.rank ? send_of(p, place(c, in)) : payload_of(p, 0); };
  if (!reduces(c.func)) {
    for (int p = 0; p < c.nranks; ++p)
      if (Part in = part(c, p, c.rank); in.bytes)
        s->copy(input(p, in), recv_of(c.rank, slot(c, p)), in.bytes);
    return;
  }
  Part mine = part(c, c.rank, c.rank);
  if (mine.bytes == 0) return;
  for (int p = 0; p < c.nranks; ++p) s->inputs.push_back(input(p, mine));
  s->reduce(recv_of(c.rank, 0), mine.bytes);
}

// What a host's ranks may have on the way to other hosts at once. More overflows the queues of the network:
// TCP then waits for 200 ms, and sends again.
constexpr size_t kOnTheWay = 1 << 20;

// Limits the messages on the way to other hosts. In step i a rank sends to the i-th rank after it and
// receives from the i-th before it, and it sends only when the message of an earlier step has come.
class Pace {
 public:
  explicit Pace(const Call& c) : layout_(*c.layout), rank_(c.rank) {
    size_t here = layout_.hosts[layout_.host[size_t(rank_)]].size();
    steps_ = std::max<size_t>(2, kOnTheWay / std::max<size_t>(1, c.bytes() * here));
  }
  // What a message to a rank comes after.
  int32_t before(int to) const {
    bool waits = !layout_.same_host(rank_, to) && came_.size() >= steps_;
    return waits ? came_[came_.size() - steps_] : Action::kNone;
  }
  void comes(int from, int32_t action) {
    if (!layout_.same_host(rank_, from)) came_.push_back(action);
  }

 private:
  const Layout& layout_;
  const int rank_;
  size_t steps_;
  std::vector<int32_t> came_;
};

// Calls without a reduction: every rank reads what it needs from its source. In a gather, where the root
// alone needs anything, the ranks write it there.
class Copies {
 public:
  Copies(const Call& c, Schedule* s) : c_(c), s_(s), writes_(c.func == Func::Gather), pace_(c) {}

  void plan() {
    for (int i = 1; i < c_.nranks; ++i) {
      give((c_.rank + i) % c_.nranks);
      take((c_.rank - i + c_.nranks) % c_.nranks);
    }
    if (Part own = part(c_, c_.rank, c_.rank); own.bytes)
      s_->copy(send_of(c_.rank, own.offset), recv_of(c_.rank, slot(c_, c_.rank)), own.bytes);
    each_peer(c_, [&](int p) {
      Part theirs = writes_ ? part(c_, p, c_.rank) : part(c_, c_.rank, p);
      if (is_direct(p) && theirs.bytes) s_->wait(p, kDone);
    });
  }

 private:
  bool is_direct(int p) const { return c_.direct[size_t(p)]; }
  void give(int to) {
    Part out = part(c_, c_.rank, to);
    bool direct = is_direct(to);
    if (out.bytes == 0 || (direct && !writes_)) return;
    Place place = direct ? recv_of(to, slot(c_, c_.rank)) : pipe_of(to);
    int32_t put = s_->copy(send_of(c_.rank, out.offset), place, out.bytes);
    s_->actions[size_t(put)].after = pace_.before(to);
    if (direct) s_->notify(to, kDone, put);
  }
  void take(int from) {
    Part in = part(c_, from, c_.rank);
    bool direct = is_direct(from);
    if (in.bytes == 0 || (direct && writes_)) return;
    Place place = direct ? send_of(from, in.offset) : pipe_of(from);
    int32_t got = s_->copy(place, recv_of(c_.rank, slot(c_, from)), in.bytes);
    pace_.comes(from, got);
    if (direct) s_->notify(from, kDone, got);
  }

  const Call& c_;
  Schedule* s_;
  const bool writes_;
  Pace pace_;
};

void copies(const Call& c, Schedule* s) { Copies(c, s).plan(); }

// Adds the reduction of all send buffers at `offset`.
int32_t reduce_all(const Call& c, size_t offset, Place to, size_t bytes, Schedule* s) {
  for (int p = 0; p < c.nranks; ++p)
    s->inputs.push_back(p == c.rank || c.direct[size_t(p)] ? send_of(p, offset) : pipe_of(p));
  return s->reduce(to, bytes);
}

// reduce_scatter, reduce: a rank that needs a result computes it.
void reduce_where_needed(const Call& c, Schedule* s) {
  each_peer(c, [&](int p) {
    if (Part out = part(c, c.rank, p); out.bytes && !c.direct[size_t(p)])
      s->copy(send_of(c.rank, out.offset), pipe_of(p), out.bytes);
  });
  if (Part mine = part(c, c.rank, c.rank); mine.bytes) {
    int32_t reduced = reduce_all(c, mine.offset, recv_of(c.rank, 0), mine.bytes, s);
    each_peer(c, [&](int p) {
      if (c.direct[size_t(p)]) s->notify(p, kDone, reduced);
    });
  }
  each_peer(c, [&](int p) {
    if (c.direct[size_t(p)] && part(c, c.rank, p).bytes) s->wait(p, kDone);
  });
}

// A reduce across hosts would send its results over the network, too.
bool in_shares(Func func, const Layout& layout) {
  return func == Func::AllReduce || (func == Func::Reduce && !layout.spans_hosts());
}

// The part of an all_reduce or a reduce that a rank computes.
Part share(const Call& c, int rank) { return share_of(c.count, c.item, rank, c.nranks); }

// all_reduce, reduce: each rank reduces its share and writes each finished block directly into the buffers of
// the peers that get the result, while the block is in its cache. Only one core writes a cache line, so
// ownership of the line does not move. Overwriting is safe, since only this rank reads that part of the
// peers' buffers.
void reduce_shares(const Call& c, Schedule* s) {
  auto gets = [&](int p) { return c.func == Func::AllReduce || p == c.root; };
  Part mine = share(c, c.rank);
  std::vector<int32_t> raw(size_t(c.nranks), Action::kNone);
  each_peer(c, [&](int p) {
    Part theirs = share(c, p);
    if (theirs.bytes && !c.direct[size_t(p)])
      raw[size_t(p)] = s->copy(send_of(c.rank, theirs.offset), pipe_of(p), theirs.bytes);
  });
  int32_t reduced = Action::kNone;
  if (mine.bytes) {
    if (!gets(c.rank)) s->scratch = mine.bytes;
    Place result = gets(c.rank) ? recv_of(c.rank, mine.offset) : Place{Place::Scratch, c.rank, 0};
    reduced = reduce_all(c, mine.offset, result, mine.bytes, s);
    each_peer(c, [&](int p) {
      bool direct = c.direct[size_t(p)];
      int32_t last = reduced;
      if (gets(p)) {
        last = s->copy(result, direct ? recv_of(p, mine.offset) : pipe_of(p), mine.bytes);
        s->actions[size_t(last)].follows = reduced;
        s->actions[size_t(last)].after = raw[size_t(p)];
      }
      if (direct) s->notify(p, kDone, last);
    });
  }
  each_peer(c, [&](int p) {
    Part theirs = share(c, p);
    if (theirs.bytes == 0) return;
    if (c.direct[size_t(p)]) {
      s->wait(p, kDone);
    } else if (gets(c.rank)) {
      int32_t in = s->copy(pipe_of(p), recv_of(c.rank, theirs.offset), theirs.bytes);
      s->actions[size_t(in)].after = reduced;
    }
  });
}

// all_reduce of data that all ranks show: each rank reduces its share, and shows the result in place of its
// input, which no other rank reads.
void reduce_shown(const Call& c, Schedule* s) {
  Part mine = share(c, c.rank);
  if (mine.bytes) {
    for (int p = 0; p < c.nranks; ++p)
      s->inputs.push_back(p == c.rank ? send_of(p, mine.offset) : payload_of(p, mine.offset));
    int32_t reduced = s->reduce(payload_of(c.rank, mine.offset), mine.bytes);
    each_peer(c, [&](int p) { s->notify(p, kReduced, reduced); });
    int32_t out = s->copy(payload_of(c.rank, mine.offset), recv_of(c.rank, mine.offset), mine.bytes);
    s->actions[size_t(out)].after = reduced;
  }
  each_peer(c, [&](int p) {
    Part theirs = share(c, p);
    if (theirs.bytes == 0) return;
    int32_t shown = s->wait(p, kReduced);
    int32_t in = s->copy(payload_of(p, theirs.offset), recv_of(c.rank, theirs.offset), theirs.bytes);
    s->actions[size_t(in)].after = shown;
  });
}

// Too much for each rank to compute all of it. A rank alone shows nothing.
bool shown_by_all(const CallKind& c) { return c.nranks > 1 && c.payloads && !c.few; }

bool across_hosts(const CallKind& c, Func func) { return c.func == func && goes_by_hosts(func, *c.layout); }

const Algorithm kAlgorithms[] = {
    {"pieces", [](const CallKind& c) { return c.cut; }, nullptr},
    {"shown shares", [](const CallKind& c) { return shown_by_all(c) && c.func == Func::AllReduce; },
     reduce_shown},
    {"local", [](const CallKind& c) { return c.payloads || c.nranks == 1; }, local},
    {"all_reduce across hosts", [](const CallKind& c) { return across_hosts(c, Func::AllReduce); },
     all_reduce_across_hosts},
    {"reduce_scatter across hosts", [](const CallKind& c) { return across_hosts(c, Func::ReduceScatter); },
     reduce_scatter_across_hosts},
    {"reduce across hosts", [](const CallKind& c) { return across_hosts(c, Func::Reduce); },
     reduce_across_hosts},
    {"all_gather across hosts", [](const CallKind& c) { return across_hosts(c, Func::AllGather); },
     all_gather_across_hosts},
    {"broadcast across hosts", [](const CallKind& c) { return across_hosts(c, Func::Broadcast); },
     broadcast_across_hosts},
    {"copies", [](const CallKind& c) { return !reduces(c.func); }, copies},
    {"shares", [](const CallKind& c) { return in_shares(c.func, *c.layout); }, reduce_shares},
    {"where needed", [](const CallKind&) { return true; }, reduce_where_needed},
};

}  // namespace

bool goes_by_hosts(Func func, const Layout& layout) {
  if (!layout.by_hosts || !layout.spans_hosts()) return false;
  bool several = layout.hosts.size() < layout.host.size();
  return func == Func::Broadcast || (several && (reduces(func) || func == Func::AllGather));
}

Access accessed(const Op& op, const Layout& layout, int owner, int by) {
  size_t bytes = op.bytes(), all = bytes * layout.host.size();
  Part none{0, 0}, whole{0, bytes}, needed = part_for(op.func, op.root, bytes, owner, by);
  bool root = owner == op.root;
  if (!goes_by_hosts(op.func, layout)) {
    if (in_shares(op.func, layout)) return {whole, op.func == Func::AllReduce || root ? whole : none};
    if (op.func == Func::Gather) return {none, root ? Part{size_t(by) * bytes, bytes} : none};
    return {needed, none};
  }
  switch (op.func) {
    case Func::AllReduce:
      return {whole, whole};
    case Func::ReduceScatter:
      return {{0, all}, none};
    case Func::Reduce:
      return {whole, root ? whole : none};
    case Func::AllGather:
      return {none, {0, all}};
    default:
      return layout.same_host(owner, op.root) ? Access{needed, none} : Access{none, whole};
  }
}

const Algorithm& algorithm_for(const CallKind& kind) {
  const Algorithm* a = kAlgorithms;
  while (!a->fits(kind)) ++a;
  return *a;
}

}  // namespace pncpu
