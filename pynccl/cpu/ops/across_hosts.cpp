#include "ops/across_hosts.hpp"

#include <algorithm>

#include "ops/places.hpp"

namespace pncpu {
namespace {

constexpr int32_t kNone = Action::kNone;

// Writes one schedule. It keeps the order of the actions on each pipe, and of those that use the buffers of
// each peer of this host, the neighbours.
class Planner {
 public:
  // `parts`, by owner: where they lie in the whole.
  Planner(const Call& call, std::vector<Part> parts, Schedule* schedule)
      : c_(call),
        at_(*call.layout),
        s_(schedule),
        here_(at_.hosts[at_.host[size_t(call.rank)]]),
        parts_(std::move(parts)),
        last_in_(size_t(call.nranks), kNone),
        last_out_(size_t(call.nranks), kNone),
        last_use_(size_t(call.nranks), kNone) {
    // Each rank begins with another one.
    size_t mine = at_.index[size_t(call.rank)];
    for (size_t i = 1; i < here_.size(); ++i) neighbours_.push_back(here_[(mine + i) % here_.size()]);
  }

  // The owners on other hosts whose parts a rank of this host handles; each host begins with another one.
  std::vector<int> handled_by(int rank) const {
    std::vector<int> owners;
    size_t mine = at_.host[size_t(rank)], hosts = at_.hosts.size();
    for (size_t i = 1; i < hosts; ++i)
      for (int owner : at_.hosts[(mine + i) % hosts])
        if (bytes(owner) && at_.partner(mine, owner) == rank) owners.push_back(owner);
    return owners;
  }

  // Reduces the inputs of this host for the parts that this rank handles or owns, at `to(owner)`, sends these
  // to their owners, and reduces what comes from the other hosts for this rank's own part.
  template <class To>
  void reduce_parts(To&& to) {
    for (int p : neighbours_) {
      if (is_direct(p)) continue;
      for (int owner : with_own(handled_by(p), p))
        to_pipe(p, send_of(c_.rank, parts_[size_t(owner)].offset), owner);
    }
    int32_t before = kNone;
    for (int owner : with_own(handled_by(c_.rank), c_.rank)) {
      const Part& part = parts_[size_t(owner)];
      for (int p : here_)
        s_->inputs.push_back(p == c_.rank || is_direct(p) ? send_of(p, part.offset) : pipe_of(p));
      // One after the other: in this order the parts arrive from the neighbours.
      before = reduce(to(owner), part.bytes, Action::Partial, before);
      if (owner != c_.rank) s_->actions[size_t(to_pipe(owner, to(owner), owner))].follows = before;
    }
    for (int p : neighbours_) last_in_[size_t(p)] = last_use_[size_t(p)] = before;
    if (!bytes(c_.rank)) return;
    for (size_t h = 0; h < at_.hosts.size(); ++h)
      s_->inputs.push_back(is_here(h) ? to(c_.rank) : pipe_of(at_.partner(h, c_.rank)));
    own_ = reduce(to(c_.rank), bytes(c_.rank), Action::Last, kNone);
    s_->actions[size_t(own_)].follows = before;
    for (size_t h = 0; h < at_.hosts.size(); ++h)
      if (!is_here(h)) last_in_[size_t(at_.partner(h, c_.rank))] = own_;
  }

  // Sends this rank's own part, at `from`, to all ranks, and receives all other parts; each goes to its place
  // in the receive buffer.
  void spread_parts(Place from) {
    if (bytes(c_.rank)) {
      for (size_t h = 0; h < at_.hosts.size(); ++h)
        if (!is_here(h)) follow(to_pipe(at_.partner(h, c_.rank), from, c_.rank), own_);
      deliver_to_all(from, c_.rank, own_);
    }
    for (int owner : handled_by(c_.rank)) {
      int32_t in = from_pipe(owner, owner);
      deliver_to_all(recv_of(c_.rank, parts_[size_t(owner)].offset), owner, in);
    }
    for (int p : neighbours_)
      if (!is_direct(p))
        for (int owner : with_own(handled_by(p), p, true)) from_pipe(p, owner);
  }

  // Gets an owner's part from a neighbour that has all of them in its send buffer.
  int32_t fetch(int p, int owner) {
    if (!is_direct(p)) return from_pipe(p, owner);
    const Part& part = parts_[size_t(owner)];
    int32_t copy = s_->copy(send_of(p, part.offset), recv_of(c_.rank, part.offset), part.bytes);
    s_->actions[size_t(copy)].after = last_use_[size_t(p)];
    return last_use_[size_t(p)] = copy;
  }

  // Tells a neighbour that this rank has finished with its buffers.
  void leave(int p) {
    if (is_direct(p) && last_use_[size_t(p)] != kNone) s_->notify(p, kDone, last_use_[size_t(p)]);
  }
  // Tells all neighbours, and waits for the same.
  void leave_buffers() {
    for (int p : neighbours_) leave(p);
    for (int p : neighbours_)
      if (is_direct(p) && !with_own(handled_by(p), p).empty()) s_->wait(p, kDone);
  }

  // Sends an owner's part on to a neighbour: into its receive buffer.
  void deliver(int p, Place from, int owner, int32_t follows) {
    if (!is_direct(p)) return follow(to_pipe(p, from, owner), follows);
    const Part& part = parts_[size_t(owner)];
    int32_t copy = s_->copy(from, recv_of(p, part.offset), part.bytes);
    s_->actions[size_t(copy)].after = last_use_[size_t(p)];
    follow(last_use_[size_t(p)] = copy, follows);
  }
  void deliver_to_all(Place from, int owner, int32_t follows) {
    for (int p : neighbours_) deliver(p, from, owner, follows);
  }
  int32_t to_pipe(int p, Place from, int owner) {
    int32_t copy = s_->copy(from, pipe_of(p), bytes(owner));
    s_->actions[size_t(copy)].after = last_out_[size_t(p)];
    return last_out_[size_t(p)] = copy;
  }
  int32_t from_pipe(int p, int owner) {
    int32_t copy = s_->copy(pipe_of(p), recv_of(c_.rank, parts_[size_t(owner)].offset), bytes(owner));
    s_->actions[size_t(copy)].after = last_in_[size_t(p)];
    return last_in_[size_t(p)] = copy;
  }
  void follow(int32_t action, int32_t other) { s_->actions[size_t(action)].follows = other; }

  size_t bytes(int owner) const { return parts_[size_t(owner)].bytes; }
  bool is_direct(int p) const { return c_.direct[size_t(p)]; }
  bool is_here(size_t host) const { return host == at_.host[size_t(c_.rank)]; }
  int32_t own() const { return own_; }
  const std::vector<int>& neighbours() const { return neighbours_; }

 private:
  std::vector<int> with_own(std::vector<int> owners, int own, bool first = false) const {
    if (bytes(own)) owners.insert(first ? owners.begin() : owners.end(), own);
    return owners;
  }
  int32_t reduce(Place to, size_t bytes, Action::Share share, int32_t after) {
    int32_t action = s_->reduce(to, bytes);
    s_->actions[size_t(action)].share = share;
    s_->actions[size_t(action)].after = after;
    return action;
  }

  const Call& c_;
  const Layout& at_;
  Schedule* s_;
  const std::vector<int>& here_;
  std::vector<int> neighbours_;
  std::vector<Part> parts_;
  // By rank: the last action on the pipe from it, on the pipe to it, and on its buffers.
  std::vector<int32_t> last_in_, last_out_, last_use_;
  int32_t own_ = kNone;  // what gives this rank's own part; none: it is an input
};

// The part of each rank, one behind the other.
std::vector<Part> blocks_of(const Call& c) {
  std::vector<Part> parts;
  for (int r = 0; r < c.nranks; ++r) parts.push_back({size_t(r) * c.bytes(), c.bytes()});
  return parts;
}

// The parts of a call's elements that ranks own, equal but for the last; the other ranks own nothing.
std::vector<Part> shares_of(const Call& c, const std::vector<int>& owners) {
  std::vector<Part> parts(size_t(c.nranks), Part{0, 0});
  for (size_t i = 0; i < owners.size(); ++i)
    parts[size_t(owners[i])] = share_of(c.count, c.item, int(i), int(owners.size()));
  return parts;
}

// Where the parts that this rank handles are kept, by owner.
class Kept {
 public:
  Kept(const Call& c, const Planner& planner, Schedule* s)
      : at_(size_t(c.nranks), Place{Place::Scratch, c.rank, 0}) {
    for (int owner : planner.handled_by(c.rank)) keep(owner, planner.bytes(owner), s);
  }
  void keep(int owner, size_t bytes, Schedule* s) {
    at_[size_t(owner)].offset = s->scratch;
    s->scratch += align_up(bytes, kCacheLine);
  }
  void put(int owner, Place place) { at_[size_t(owner)] = place; }
  Place operator()(int owner) const { return at_[size_t(owner)]; }

 private:
  std::vector<Place> at_;
};

// The way of a broadcast's parts from host to host. Large data pass through the hosts one after the other, so
// that each host sends them once. A tree has fewer steps: numbered from the root's host on, host v sends to
// v + 1, v + 2, v + 4 and so on below its lowest bit.
constexpr size_t kChainBytes = 64 << 10;  // for each host

class Route {
 public:
  Route(const Call& c, int root) : hosts_(c.layout->hosts.size()), root_(c.layout->host[size_t(root)]) {
    is_chain_ = c.bytes() >= kChainBytes * hosts_;
  }
  size_t before(size_t host) const {
    size_t v = (host + hosts_ - root_) % hosts_;
    return at(is_chain_ ? v - 1 : v & (v - 1));
  }
  std::vector<size_t> after(size_t host) const {
    size_t v = (host + hosts_ - root_) % hosts_;
    std::vector<size_t> next;
    for (size_t step = 1; v + step < hosts_ && (is_chain_ ? step == 1 : !(v & step)); step *= 2)
      next.insert(next.begin(), at(v + step));  // the largest subtree first
    return next;
  }

 private:
  size_t at(size_t v) const { return (v + root_) % hosts_; }
  size_t hosts_, root_;
  bool is_chain_;
};

// The ranks of the root's host own the parts.
class Broadcast {
 public:
  Broadcast(const Call& c, Schedule* s)
      : c_(c),
        at_(*c.layout),
        s_(s),
        here_(at_.host[size_t(c.rank)]),
        source_(at_.host[size_t(c.root)]),
        owners_(at_.hosts[source_]),
        parts_(shares_of(c, owners_)),
        planner_(c, parts_, s),
        route_(c, c.root) {}

  // The root.
  void give() {
    s_->copy(send_of(c_.rank, 0), recv_of(c_.rank, 0), c_.bytes());
    if (planner_.bytes(c_.rank)) pass_on(c_.rank, send_of(c_.rank, offset(c_.rank)), kNone);
    for (int p : planner_.neighbours())
      if (!planner_.is_direct(p))
        for (int owner : own_first(p)) planner_.to_pipe(p, send_of(c_.rank, offset(owner)), owner);
    for (int p : planner_.neighbours())
      if (planner_.is_direct(p)) s_->wait(p, kDone);
  }

  void take_from_root() {
    for (int owner : own_first(c_.rank)) {
      int32_t in = planner_.fetch(c_.root, owner);
      if (owner == c_.rank) pass_on(owner, recv_of(c_.rank, offset(owner)), in);
    }
    planner_.leave(c_.root);
  }

  void take_from_hosts() {
    size_t before = route_.before(here_);
    for (int owner : planner_.handled_by(c_.rank)) {
      int32_t in = planner_.from_pipe(before == source_ ? owner : at_.partner(before, owner), owner);
      pass_on(owner, recv_of(c_.rank, offset(owner)), in);
      planner_.deliver_to_all(recv_of(c_.rank, offset(owner)), owner, in);
    }
    for (int p : planner_.neighbours())
      if (!planner_.is_direct(p))
        for (int owner : planner_.handled_by(p)) planner_.from_pipe(p, owner);
    planner_.leave_buffers();
  }

 private:
  void pass_on(int owner, Place from, int32_t follows) {
    for (size_t next : route_.after(here_))
      planner_.follow(planner_.to_pipe(at_.partner(next, owner), from, owner), follows);
  }
  // A rank gets its own part first, which it passes on.
  std::vector<int> own_first(int own) const {
    std::vector<int> order;
    for (int owner : owners_)
      if (planner_.bytes(owner)) order.insert(owner == own ? order.begin() : order.end(), owner);
    return order;
  }
  size_t offset(int owner) const { return parts_[size_t(owner)].offset; }

  const Call& c_;
  const Layout& at_;
  Schedule* s_;
  const size_t here_, source_;
  const std::vector<int>& owners_;
  const std::vector<Part> parts_;
  Planner planner_;
  const Route route_;
};

}  // namespace

void all_reduce_across_hosts(const Call& c, Schedule* s) {
  std::vector<Part> parts;
  for (int r = 0; r < c.nranks; ++r) parts.push_back(share_of(c.count, c.item, r, c.nranks));
  Planner planner(c, parts, s);
  // An owner sends the result of a part only after it has received what is kept there.
  auto to = [&](int owner) { return recv_of(c.rank, parts[size_t(owner)].offset); };
  planner.reduce_parts(to);
  planner.spread_parts(to(c.rank));
  planner.leave_buffers();
}

void reduce_scatter_across_hosts(const Call& c, Schedule* s) {
  Planner planner(c, blocks_of(c), s);
  Kept kept(c, planner, s);
  kept.put(c.rank, recv_of(c.rank, 0));
  planner.reduce_parts(kept);
  planner.leave_buffers();
}

void reduce_across_hosts(const Call& c, Schedule* s) {
  const std::vector<int>& owners = c.layout->hosts[c.layout->host[size_t(c.root)]];
  std::vector<Part> parts = shares_of(c, owners);
  Planner planner(c, parts, s);
  Kept kept(c, planner, s);
  if (c.rank == c.root)
    kept.put(c.rank, recv_of(c.rank, parts[size_t(c.rank)].offset));
  else
    kept.keep(c.rank, planner.bytes(c.rank), s);
  planner.reduce_parts(kept);
  if (c.rank == c.root) {
    for (int p : planner.neighbours())
      if (!planner.is_direct(p) && planner.bytes(p)) planner.from_pipe(p, p);
  } else if (planner.bytes(c.rank)) {
    planner.deliver(c.root, kept(c.rank), c.rank, planner.own());
  }
  planner.leave_buffers();
}

void all_gather_across_hosts(const Call& c, Schedule* s) {
  Planner planner(c, blocks_of(c), s);
  s->copy(send_of(c.rank, 0), recv_of(c.rank, size_t(c.rank) * c.bytes()), c.bytes());
  planner.spread_parts(send_of(c.rank, 0));
  planner.leave_buffers();
}

void broadcast_across_hosts(const Call& c, Schedule* s) {
  Broadcast broadcast(c, s);
  if (c.rank == c.root)
    broadcast.give();
  else if (c.layout->same_host(c.rank, c.root))
    broadcast.take_from_root();
  else
    broadcast.take_from_hosts();
}

}  // namespace pncpu
