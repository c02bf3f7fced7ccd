#include "ops/collectives.hpp"

#include <algorithm>

#include "comm/comm.hpp"

namespace pncpu {
namespace {

constexpr size_t kSlice = size_t(1) << 20;  // moved at a time between two looks at everything else

const char* at(const void* base, size_t offset) { return static_cast<const char*>(base) + offset; }
char* at(void* base, size_t offset) { return static_cast<char*>(base) + offset; }

void copy(void* to, const void* from, size_t bytes) {
  if (bytes && to != from) memmove(to, from, bytes);
}

}  // namespace

const char* func_name(Func f) {
  static const char* const names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter",
                                      "AlltoAll",  "Gather", "Scatter",   "Send",      "Recv"};
  return size_t(f) < sizeof names / sizeof *names ? names[size_t(f)] : "?";
}

std::string Header::str() const {
  std::string text = std::string(func_name(Func(func))) + "(count " + std::to_string(count) + ", " +
                     type_name(ncclDataType_t(dtype));
  if (reduces(Func(func))) text += std::string(", ") + op_name(RedKind(red));
  if (has_root(Func(func))) text += ", root " + std::to_string(root);
  return text + ")";
}

Header header_of(const Op& op, uint64_t seq) {
  Header h;
  h.func = uint8_t(op.func);
  h.dtype = uint8_t(op.dtype);
  h.red = reduces(op.func) ? uint8_t(op.red) : 0;
  h.root = op.root;
  h.count = op.count;
  h.seq = seq;
  h.send = reinterpret_cast<uintptr_t>(op.send);
  h.recv = reinterpret_cast<uintptr_t>(op.recv);
  h.scalar = op.scalar;
  if (op.scalar_at) memcpy(h.scalar.bytes, op.scalar_at, type_size(op.dtype));
  return h;
}

void Coll::start(const Op& op, uint64_t seq) {
  op_ = op;
  mine_ = header_of(op, seq);
  mine_.is_inline = op.bytes() <= comm_.session.inline_bytes;
  state_ = State::Announce;
  running_ = true;
  links_.resize(size_t(comm_.nranks));
  scalars_.resize(size_t(comm_.nranks));
  for (Link& l : links_) {
    l.told = l.heard = false;
    l.block_filled = 0;
    l.raw_out = l.out = l.in = Part();
  }
  links_[size_t(comm_.rank)].header = mine_;
}

Step Coll::step() {
  if (comm_.nranks == 1) return run_alone();
  bool moved = false;
  for (;;) {
    Step s = Step::Blocked;
    if (state_ == State::Announce) {
      bool told = announce();
      comm_.ring_peers();  // before the work that may follow at once, or the peers would begin after it
      s = hear();
      if (s == Step::Failed) return s;
      s = told && s == Step::Done ? Step::Done : Step::Blocked;
      if (s == Step::Done) {
        state_ = mine_.is_inline ? State::Inline : State::Move;
        if (!mine_.is_inline) plan();
      }
    } else if (state_ == State::Inline) {
      s = finish_inline();
      if (s == Step::Done) return running_ = false, s;
    } else if (state_ == State::Move) {
      s = move();
      if (s == Step::Done) state_ = State::Depart;
    } else {
      s = depart();
      if (s == Step::Done) return running_ = false, s;
    }
    if (s == Step::Failed) return s;
    if (s == Step::Blocked) return moved ? Step::Moved : s;
    if (s == Step::Moved) return s;
    moved = true;
  }
}

Step Coll::run_alone() {
  running_ = false;
  if (op_.bytes() == 0) return Step::Done;
  if (reduces(op_.func)) {
    scalars_[0] = mine_.scalar;
    const void* input = op_.send;
    reduce_into(op_.recv, &input, op_.count);
  } else {
    copy(op_.recv, op_.send, op_.bytes());
  }
  return Step::Done;
}

void Coll::reduce_into(void* out, const void* const* inputs, size_t count) {
  reduce(out, inputs, comm_.nranks, count, op_.dtype, op_.red, comm_.nranks, scalars_.data());
}

Span Coll::payload_for(int p) const {
  size_t bytes = op_.bytes();
  switch (op_.func) {
    case Func::AllReduce:
    case Func::AllGather:
      return {at(op_.send, 0), bytes};
    case Func::Reduce:
    case Func::Gather:
      return {at(op_.send, 0), p == op_.root ? bytes : 0};
    case Func::Broadcast:
      return {at(op_.send, 0), comm_.rank == op_.root ? bytes : 0};
    case Func::Scatter:
      return {at(op_.send, size_t(p) * bytes), comm_.rank == op_.root ? bytes : 0};
    default:
      return {at(op_.send, size_t(p) * bytes), bytes};
  }
}

bool Coll::announce() {
  bool all = true;
  for (int i = 1; i < comm_.nranks; ++i) {
    int p = (comm_.rank + i) % comm_.nranks;
    Link& l = links_[size_t(p)];
    Pipe& pipe = comm_.peer(p).pipe[kColl];
    if (l.told) {
      all = pipe.flush() && all;
      continue;
    }
    Span payload = mine_.is_inline ? payload_for(p) : Span{nullptr, 0};
    Header header = mine_;
    header.payload = uint32_t(payload.size);
    l.told = pipe.put(&header, sizeof header, payload.data, payload.size);
    all = l.told && pipe.flush() && all;
  }
  return all;
}

Step Coll::hear() {
  bool all = true;
  for (int p = 0; p < comm_.nranks; ++p) {
    Link& l = links_[size_t(p)];
    if (p == comm_.rank || l.heard) continue;
    Pipe& pipe = comm_.peer(p).pipe[kColl];
    size_t readable = pipe.readable();
    if (readable >= sizeof l.header) {
      pipe.copy_out(0, &l.header, sizeof l.header);
      if (!l.header.same_call(mine_)) return l.heard = true, mismatch(p);
      l.heard = readable >= sizeof l.header + l.header.payload;
      if (l.heard && !mine_.is_inline) pipe.consume(sizeof l.header);
    }
    all = all && l.heard;
  }
  return all ? Step::Done : Step::Blocked;
}

Step Coll::mismatch(int from) {
  std::string text = "collective #" + std::to_string(mine_.seq) + " differs between ranks:";
  for (int p = 0; p < comm_.nranks; ++p)
    if (p == comm_.rank || p == from || links_[size_t(p)].heard)
      text += (text.back() == ':' ? " rank " : "; rank ") + std::to_string(p) + " called " +
              links_[size_t(p)].header.str();
  return comm_.mismatch(text);
}

Step Coll::finish_inline() {
  size_t bytes = op_.bytes();
  std::vector<const void*> inputs(size_t(comm_.nranks), nullptr);
  for (int p = 0; p < comm_.nranks; ++p) {
    Link& l = links_[size_t(p)];
    scalars_[size_t(p)] = l.header.scalar;
    if (p == comm_.rank || l.header.payload == 0) continue;
    Pipe& pipe = comm_.peer(p).pipe[kColl];
    Span span = pipe.peek();
    if (span.size < sizeof l.header + l.header.payload) {
      l.scratch.resize(std::max<size_t>(l.scratch.size(), l.header.payload));
      pipe.copy_out(sizeof l.header, l.scratch.data(), l.header.payload);
      inputs[size_t(p)] = l.scratch.data();
    } else {
      inputs[size_t(p)] = span.data + sizeof l.header;
    }
  }
  bool root = comm_.rank == op_.root;
  if (bytes && op_.recv) {
    const char* own = payload_for(comm_.rank).data;
    inputs[size_t(comm_.rank)] = own;
    if (op_.func == Func::AllReduce || op_.func == Func::ReduceScatter ||
        (op_.func == Func::Reduce && root)) {
      reduce_into(op_.recv, inputs.data(), op_.count);
    } else if (op_.func == Func::Broadcast || op_.func == Func::Scatter) {
      copy(op_.recv, root ? own : inputs[size_t(op_.root)], bytes);
    } else if (op_.func == Func::AllGather || op_.func == Func::AlltoAll ||
               (op_.func == Func::Gather && root)) {
      for (int p = 0; p < comm_.nranks; ++p) copy(at(op_.recv, size_t(p) * bytes), inputs[size_t(p)], bytes);
    }
  }
  for (int p = 0; p < comm_.nranks; ++p)
    if (p != comm_.rank) comm_.peer(p).pipe[kColl].consume(sizeof(Header) + links_[size_t(p)].header.payload);
  return Step::Done;
}

void Coll::segment_of(int rank, size_t* first, size_t* count) const {
  size_t unit = kCacheLine / type_size(op_.dtype);
  size_t per = align_up((op_.count + size_t(comm_.nranks) - 1) / size_t(comm_.nranks), unit);
  *first = std::min(per * size_t(rank), op_.count);
  *count = std::min(per, op_.count - *first);
}

void Coll::plan() {
  share_first_ = share_count_ = share_done_ = 0;
  passes_results_on_ = false;
  block_count_ = comm_.session.block_bytes / type_size(op_.dtype);
  for (int p = 0; p < comm_.nranks; ++p) scalars_[size_t(p)] = links_[size_t(p)].header.scalar;
  if (reduces(op_.func))
    plan_reduction();
  else
    plan_copies();
}

void Coll::plan_copies() {
  size_t bytes = op_.bytes();
  bool root = comm_.rank == op_.root;
  Func f = op_.func;
  for (int p = 0; p < comm_.nranks; ++p) {
    Link& l = links_[size_t(p)];
    size_t theirs = size_t(p) * bytes, ours = size_t(comm_.rank) * bytes;
    uint64_t remote = l.header.send;
    bool from_p = f == Func::AllGather || f == Func::AlltoAll || (f == Func::Gather && root) ||
                  ((f == Func::Broadcast || f == Func::Scatter) && p == op_.root);
    if (f == Func::AlltoAll || f == Func::Scatter) remote += ours;
    bool spread = f == Func::AllGather || f == Func::AlltoAll || f == Func::Gather;
    if (p == comm_.rank) {
      if (from_p) copy(at(op_.recv, spread ? theirs : 0), payload_for(p).data, bytes);
      continue;
    }
    Span out = payload_for(p);
    l.out = {out.data, nullptr, out.size, 0};
    if (from_p) l.in = {reinterpret_cast<const char*>(remote), at(op_.recv, spread ? theirs : 0), bytes, 0};
  }
}

void Coll::plan_reduction() {
  size_t item = type_size(op_.dtype);
  passes_results_on_ = op_.func == Func::AllReduce;
  auto share_of = [&](int rank, size_t* first, size_t* count) {
    if (passes_results_on_) return segment_of(rank, first, count);
    *first = op_.func == Func::ReduceScatter ? size_t(rank) * op_.count : 0;
    *count = op_.func == Func::ReduceScatter || rank == op_.root ? op_.count : 0;
  };
  share_of(comm_.rank, &share_first_, &share_count_);
  share_to_ = at(op_.recv, passes_results_on_ ? share_first_ * item : 0);
  for (int p = 0; p < comm_.nranks; ++p) {
    if (p == comm_.rank) continue;
    Link& l = links_[size_t(p)];
    size_t first, count;
    share_of(p, &first, &count);
    l.raw_out = {at(op_.send, first * item), nullptr, count * item, 0};
    if (!passes_results_on_) continue;
    l.in = {reinterpret_cast<const char*>(l.header.recv + first * item), at(op_.recv, first * item),
            count * item, 0};
    l.out = {share_to_, nullptr, share_count_ * item, 0};
  }
}

bool Coll::reads_directly(int p, bool of_mine) const {
  const Link& l = links_[size_t(p)];
  Peer& peer = comm_.peer(p);
  return peer.direct && (of_mine ? l.raw_out.bytes || l.out.bytes : share_count_ || l.in.bytes);
}

Step Coll::move() {
  bool moved = false, done = true;
  auto take = [&](Step s) {
    moved = moved || s == Step::Moved;
    done = done && s == Step::Done;
    return s != Step::Failed;
  };
  for (int i = 1; i < comm_.nranks; ++i)
    if (!take(push((comm_.rank + i) % comm_.nranks))) return Step::Failed;
  if (share_done_ < share_count_) {
    if (!take(reduce_blocks())) return Step::Failed;
    if (share_done_ < share_count_) return moved ? Step::Moved : Step::Blocked;
    done = false;
    moved = true;
  }
  for (int i = 1; i < comm_.nranks; ++i)
    if (!take(pull((comm_.rank + i) % comm_.nranks))) return Step::Failed;
  return done ? Step::Done : moved ? Step::Moved : Step::Blocked;
}

Step Coll::push(int p) {
  Peer& peer = comm_.peer(p);
  Link& l = links_[size_t(p)];
  if (peer.direct) return Step::Done;
  Pipe& pipe = peer.pipe[kColl];
  bool moved = false;
  for (Part* part : {&l.raw_out, &l.out}) {
    bool result = part == &l.out && passes_results_on_;
    size_t ready = result ? std::min(part->bytes, share_done_ * type_size(op_.dtype)) : part->bytes;
    while (part->done < ready) {
      size_t n = pipe.write(part->from + part->done, std::min(ready - part->done, kSlice));
      if (n == 0) return moved ? Step::Moved : Step::Blocked;
      part->done += n;
      moved = true;
    }
    if (part->done < part->bytes) return moved ? Step::Moved : Step::Blocked;
  }
  return pipe.flush() ? Step::Done : Step::Blocked;
}

Step Coll::reduce_blocks() {
  size_t item = type_size(op_.dtype);
  std::vector<const void*> inputs(size_t(comm_.nranks), nullptr);
  for (size_t budget = 0; budget < kSlice && share_done_ < share_count_;) {
    size_t count = std::min(block_count_, share_count_ - share_done_);
    size_t offset = (share_first_ + share_done_) * item;
    bool ready = true;
    for (int p = 0; p < comm_.nranks; ++p) {
      inputs[size_t(p)] = at(op_.send, offset);
      if (p == comm_.rank) continue;
      Step s = gather_block(p, offset, count * item, &inputs[size_t(p)]);
      if (s == Step::Failed) return s;
      ready = ready && s == Step::Done;
    }
    if (!ready) return budget ? Step::Moved : Step::Blocked;
    reduce_into(at(share_to_, share_done_ * item), inputs.data(), count);
    share_done_ += count;
    budget += count * item;
    for (Link& l : links_) l.block_filled = 0;
    if (passes_results_on_ && comm_.cell() && pass_on(share_done_ - count, count) == Step::Failed)
      return Step::Failed;
  }
  return Step::Moved;
}

// Writes finished elements of this rank's share into the peers' buffers while they are in this core's cache.
// The peers have read or will never read what lies there: their inputs of this share were needed here alone.
Step Coll::pass_on(size_t first, size_t count) {
  size_t item = type_size(op_.dtype);
  for (int p = 0; p < comm_.nranks; ++p) {
    Peer& peer = comm_.peer(p);
    if (p == comm_.rank || !peer.direct) continue;
    uint64_t to = links_[size_t(p)].header.recv + (share_first_ + first) * item;
    const char* from = at(share_to_, first * item);
    RemoteResult r = RemoteResult::Ok;
    if (!comm_.begin_write(p)) continue;
    if (peer.same_process)
      memcpy(reinterpret_cast<void*>(to), from, count * item);
    else
      r = write_remote(peer.remote, from, to, count * item);
    comm_.end_write(p);
    if (r != RemoteResult::Ok) return comm_.remote_failed(p, r, func_name(op_.func));
  }
  if (first + count < share_count_) return Step::Moved;
  comm_.cell()->passed_on.store(mine_.seq, std::memory_order_release);
  for (int p = 0; p < comm_.nranks; ++p)
    if (p != comm_.rank && comm_.peer(p).direct) comm_.peer(p).cell->bell.ring();
  return Step::Moved;
}

// Makes the peer's bytes [offset, offset + bytes) of its input readable here.
Step Coll::gather_block(int p, size_t offset, size_t bytes, const void** input) {
  Peer& peer = comm_.peer(p);
  Link& l = links_[size_t(p)];
  if (peer.direct && peer.same_process) {
    *input = reinterpret_cast<const char*>(l.header.send + offset);
    return Step::Done;
  }
  l.scratch.resize(std::max(l.scratch.size(), comm_.session.block_bytes));
  *input = l.scratch.data();
  if (l.block_filled == bytes) return Step::Done;
  if (peer.direct) {
    // A peer that dies later never departs, so one proof of identity is enough.
    RemoteResult r =
        read_remote(peer.remote, l.scratch.data(), l.header.send + offset, bytes, share_done_ == 0);
    if (r != RemoteResult::Ok) return comm_.remote_failed(p, r, func_name(op_.func));
    l.block_filled = bytes;
    return Step::Done;
  }
  Pipe& pipe = peer.pipe[kColl];
  size_t n = std::min(pipe.readable(), bytes - l.block_filled);
  if (n) {
    pipe.copy_out(0, l.scratch.data() + l.block_filled, n);
    pipe.consume(n);
    l.block_filled += n;
  }
  return l.block_filled == bytes ? Step::Done : Step::Blocked;
}

Step Coll::pull(int p) {
  Link& l = links_[size_t(p)];
  Peer& peer = comm_.peer(p);
  if (l.in.done == l.in.bytes) return Step::Done;
  if (peer.direct) return pull_direct(p);
  bool moved = false;
  Pipe& pipe = peer.pipe[kColl];
  while (l.in.done < l.in.bytes) {
    size_t n = std::min(pipe.readable(), l.in.bytes - l.in.done);
    if (n == 0) return moved ? Step::Moved : Step::Blocked;
    pipe.copy_out(0, l.in.to + l.in.done, n);
    pipe.consume(n);
    l.in.done += n;
    moved = true;
  }
  return Step::Done;
}

Step Coll::pull_direct(int p) {
  Link& l = links_[size_t(p)];
  Peer& peer = comm_.peer(p);
  if (passes_results_on_) {
    if (peer.cell->passed_on.load(std::memory_order_acquire) < mine_.seq) return Step::Blocked;
    l.in.done = l.in.bytes;
    return Step::Done;
  }
  size_t bytes = std::min(l.in.bytes - l.in.done, kSlice);
  if (peer.same_process) {
    memcpy(l.in.to + l.in.done, l.in.from + l.in.done, bytes);
  } else {
    RemoteResult r = read_remote(peer.remote, l.in.to + l.in.done,
                                 reinterpret_cast<uintptr_t>(l.in.from + l.in.done), bytes, l.in.done == 0);
    if (r != RemoteResult::Ok) return comm_.remote_failed(p, r, func_name(op_.func));
  }
  l.in.done += bytes;
  return l.in.done == l.in.bytes ? Step::Done : Step::Moved;
}

Step Coll::depart() {
  if (comm_.cell() && comm_.cell()->read_done.load(std::memory_order_relaxed) != mine_.seq) {
    comm_.cell()->read_done.store(mine_.seq, std::memory_order_release);
    for (int p = 0; p < comm_.nranks; ++p)
      if (p != comm_.rank && reads_directly(p, false)) comm_.peer(p).cell->bell.ring();
  }
  for (int p = 0; p < comm_.nranks; ++p)
    if (p != comm_.rank && reads_directly(p, true) &&
        comm_.peer(p).cell->read_done.load(std::memory_order_acquire) < mine_.seq)
      return Step::Blocked;
  return Step::Done;
}

std::vector<int> Coll::missing() const {
  std::vector<int> ranks;
  for (int p = 0; p < comm_.nranks; ++p)
    if (p != comm_.rank && running_ && state_ == State::Announce && !links_[size_t(p)].heard)
      ranks.push_back(p);
  return ranks;
}

std::string Coll::str() const { return mine_.str() + " #" + std::to_string(mine_.seq); }

}  // namespace pncpu
