#include "ops/matching.hpp"

#include <algorithm>

#include "service/wire.hpp"

namespace pncpu {

static_assert(sizeof(Header) == sizeof(Notice::head), "a notice holds a header");

size_t hear_header(Pipe& pipe, Header* header) {
  size_t readable = pipe.readable();
  if (readable < sizeof *header) return 0;
  pipe.copy_out(0, header, sizeof *header);
  return readable;
}

Step check_header(const Context& context, int from, const Header& theirs, uint64_t seq, bool is_inline,
                  size_t payload) {
  if (theirs.seq == seq && bool(theirs.is_inline) == is_inline && theirs.payload == payload)
    return Step::Done;
  return context.fail(ncclInternalError, context.who(from) + " announced " + theirs.str() + " as #" +
                                             std::to_string(theirs.seq) + " with " +
                                             std::to_string(theirs.payload) + " bytes, expected #" +
                                             std::to_string(seq) + " with " + std::to_string(payload) +
                                             ": what it sends is corrupt");
}

static bool is_channel(const Header& call) {
  return Func(call.func) == Func::AllGather && call.root == kChannelExchange;
}

// What is shown is copied twice. If more ranks than this show all of their board, it leaves the caches before
// the second copy.
constexpr size_t kRanksInCache = 4;

size_t most_with_header(const Context& context, Func func) {
  // A rank's send buffer has this many parts of the call's size.
  size_t parts = part_for(func, 0, 1, 0, context.nranks - 1).offset + 1, board = context.board_bytes / parts;
  size_t shown = context.layout.spans_hosts() ? 0 : context.shown_bytes / parts;
  if (func == Func::AlltoAll) shown = shown * kRanksInCache / std::max(parts, kRanksInCache);
  return std::min(std::max(context.inline_bytes, shown), board);
}

bool cuts(const Context& context, Func func) {
  // A pipe copies each byte twice for each rank that gets it: for one rank that is no more than on a board.
  bool for_several = func == Func::Broadcast || func == Func::AllGather;
  bool faster = func == Func::AllReduce || func == Func::ReduceScatter || (for_several && context.nranks > 2);
  return faster && context.staged &&
         most_with_header(context, func) >= std::max(context.inline_bytes + 1, kCacheLine);
}

namespace {

// How many bytes of the send buffer of `rank` the other ranks need: the root, or the last of them.
size_t needed_of(const Op& op, int rank, int nranks) {
  auto end = [&](int to) {
    Part part = part_for(op.func, op.root, op.bytes(), rank, to);
    return to != rank && part.bytes ? part.offset + part.bytes : 0;
  };
  return std::max(end(op.root), end(rank == nranks - 1 ? nranks - 2 : nranks - 1));
}
}  // namespace

void Matching::start(const Op& op, uint64_t seq, uint64_t windows, const std::vector<uint32_t>& lent) {
  // The exchange itself has the number of the program's next call.
  if (is_channel(mine_)) ++uncounted_;
  op_ = &op;
  shown_ = lends_ = false;
  mine_ = header_of(op, seq);
  mine_.windows = windows;
  mine_.is_inline = op.bytes() <= most_with_header(context_, op.func);
  // Ranks that pass data on would get more than they need of calls that send each rank another part.
  bool for_all = op.func == Func::AllReduce || op.func == Func::AllGather || op.func == Func::Broadcast;
  relayed_ = !mine_.is_inline || for_all || op.bytes() * size_t(context_.nranks) <= context_.inline_bytes;
  if (peers_.empty()) {
    relayed_routes_ = Routes(context_.layout, context_.rank);
    direct_routes_ = Routes::direct(context_.layout, context_.rank);
    known_.reserve(size_t(context_.nranks));
    peers_.resize(size_t(context_.nranks));
  }
  for (int p = 0; p < context_.nranks; ++p) {
    Peer& peer = peers_[size_t(p)];
    peer.heard = p == context_.rank;
    peer.lent = lent[size_t(p)];
    lends_ = lends_ || peer.lent;
    peer.payload = nullptr;
    if (!peer.heard && !here(p)) ++peers_[size_t(routes().bearer(p))].awaited;
  }
  peers_[size_t(context_.rank)].header = mine_;
  known_.assign(1, context_.rank);
  passed_.assign(routes().ways().size(), 0);
}

Step Matching::step() {
  bool shows = show();
  Step heard;
  size_t known;
  bool passed;
  do {
    known = known_.size();
    passed = pass_on();
    context_.ring_peers();  // before the reduction that may follow, so that the peers need not wait for it
    heard = hear();
    if (heard == Step::Failed) return heard;
  } while (known_.size() > known);
  // The last rank of the host that shows its call wakes the others; nothing changes for them before.
  if (shows && all_here()) context_.ring_host();
  return heard == Step::Done && passed ? Step::Done : context_.blocked(kColl);
}

void Matching::start_piece(const Op& piece, uint64_t seq) {
  start(piece, seq, 0, std::vector<uint32_t>(size_t(context_.nranks)));
  ++uncounted_;
}

bool Matching::lent_by_any() const {
  for (const Peer& peer : peers_)
    if (peer.header.windows || peer.header.payload) return true;
  return lends_;
}

// Copies what the other ranks need of a send buffer.
void Matching::fill(char* data, size_t bytes) const {
  const char* from = static_cast<const char*>(op_->send);
  size_t block = op_->bytes();
  if (bytes <= block || !op_->stride) {
    if (bytes) memcpy(data, from, bytes);
    return;
  }
  for (size_t at = 0; at < bytes; at += block, from += op_->stride) memcpy(data + at, from, block);
}

// True: the ranks of this host see the header from now on.
bool Matching::show() {
  if (shown_ || !context_.board) return false;
  Header header = mine_;
  char* data = nullptr;
  if (mine_.is_inline) {
    header.payload = uint32_t(needed_of(*op_, context_.rank, context_.nranks));
    data = context_.board.data(mine_.seq, header.payload);
    fill(data, header.payload);
    peers_[size_t(context_.rank)].payload = data;
  } else if (lends_) {
    header.payload = uint32_t(context_.nranks);
    data = context_.board.data(mine_.seq, header.payload);
    for (const Peer& peer : peers_) *data++ = char(peer.lent);
  }
  Notice& notice = context_.board.notice(mine_.seq);
  memcpy(notice.head, &header, sizeof header);
  notice.number.store(mine_.seq, std::memory_order_seq_cst);
  return shown_ = true;
}

// True: all has been passed on.
bool Matching::pass_on() {
  bool all = true;
  for (size_t i = 0; i < passed_.size(); ++i) {
    const Routes::Way& way = routes().ways()[i];
    Pipe& pipe = *context_.link(way.to).pipe[kColl];
    while (passed_[i] < known_.size()) {
      size_t next = pack(way, passed_[i]);
      if (!batch_.empty() && !pipe.put(batch_.data(), batch_.size(), nullptr, 0)) break;
      passed_[i] = next;
    }
    all = pipe.flush() && passed_[i] == known_.size() && all;
  }
  return all;
}

// Fills the batch from known_[at] on with as much as always fits the pipe of a neighbour; returns where the
// next one begins.
size_t Matching::pack(const Routes::Way& way, size_t at) {
  size_t most = sizeof(Passed) + context_.inline_bytes;
  batch_.clear();
  for (; at < known_.size(); ++at) {
    int origin = known_[at];
    if (!routes().passes(way, origin)) continue;
    const Peer& peer = peers_[size_t(origin)];
    Part data = passed_part(origin, way.to);
    Passed head{uint64_t(origin), peer.header};
    head.header.payload = uint32_t(data.bytes);
    if (!batch_.empty() && batch_.size() + sizeof head + data.bytes > most) break;
    const char* bytes = reinterpret_cast<const char*>(&head);
    batch_.insert(batch_.end(), bytes, bytes + sizeof head);
    if (data.bytes == 0) continue;
    const char* from = origin == context_.rank ? static_cast<const char*>(op_->send) : peer.kept.data();
    batch_.insert(batch_.end(), from + data.offset, from + data.offset + data.bytes);
  }
  return at;
}

Step Matching::hear() {
  bool all = true;
  for (int p = 0; p < context_.nranks; ++p) {
    Peer& peer = peers_[size_t(p)];
    Step s = Step::Done;
    if (!peer.heard && here(p)) s = look_at(p, peer);
    if (s == Step::Done && peer.awaited) s = hear_by(p, &peer.awaited);
    if (s == Step::Failed) return s;
    all = all && s == Step::Done;
  }
  return all ? Step::Done : Step::Blocked;
}

bool Matching::all_here() const {
  for (int p = 0; p < context_.nranks; ++p)
    if (!peers_[size_t(p)].heard && here(p)) return false;
  return true;
}

Step Matching::look_at(int p, Peer& peer) {
  const Board& board = context_.link(p).board;
  Notice& notice = board.notice(mine_.seq);
  // Of two ranks that both store and then load, at least one sees the other's number.
  uint64_t number = notice.number.load(std::memory_order_seq_cst);
  if (number < mine_.seq) return Step::Blocked;
  memcpy(static_cast<void*>(&peer.header), notice.head, sizeof peer.header);
  if (number > mine_.seq)
    return context_.fail(ncclInternalError, context_.who(p) + " shows collective #" + std::to_string(number) +
                                                ", expected #" + std::to_string(mine_.seq) +
                                                ": what it sends is corrupt");
  if (!peer.header.same_call(mine_)) return mismatch(p);
  size_t payload = mine_.is_inline       ? needed_of(*op_, p, context_.nranks)
                   : peer.header.payload ? size_t(context_.nranks)
                                         : 0;
  Step sound = check_header(context_, p, peer.header, mine_.seq, mine_.is_inline, payload);
  if (sound == Step::Failed) return sound;
  const char* data = board.data(mine_.seq, payload);
  if (mine_.is_inline)
    peer.payload = data + part(p, context_.rank).offset;
  else
    peer.header.lent = payload ? uint32_t(data[context_.rank]) : 0;
  peer.heard = true;
  return Step::Done;
}

// Headers that a rank passes on to this one.
Step Matching::hear_by(int bearer, size_t* awaited) {
  Pipe& pipe = *context_.link(bearer).pipe[kColl];
  while (*awaited) {
    Passed passed;
    size_t readable = pipe.readable();
    if (readable < sizeof passed) return Step::Blocked;
    pipe.copy_out(0, &passed, sizeof passed);
    int origin = int(std::min<uint64_t>(passed.origin, uint64_t(context_.nranks)));
    bool expected = origin < context_.nranks && !peers_[size_t(origin)].heard && !here(origin);
    // Headers of another call may have another way.
    bool same = passed.header.same_call(mine_);
    if (!expected || (same && routes().bearer(origin) != bearer))
      return context_.fail(ncclInternalError, context_.who(bearer) + " passed on a header of rank " +
                                                  std::to_string(passed.origin) +
                                                  ": what it sends is corrupt");
    Peer& peer = peers_[size_t(origin)];
    peer.header = passed.header;
    if (!same) return mismatch(origin);
    size_t payload = passed_part(origin, context_.rank).bytes;
    Step sound = check_header(context_, origin, peer.header, mine_.seq, mine_.is_inline, payload);
    if (sound == Step::Failed) return sound;
    if (readable < sizeof passed + payload) {
      if (pipe.reserve(sizeof passed + payload)) return Step::Blocked;
      return context_.fail(ncclInternalError, std::to_string(payload) + " bytes from " +
                                                  context_.who(origin) +
                                                  " do not fit into their pipe at once");
    }
    peer.kept.resize(std::max(peer.kept.size(), payload));
    if (payload) pipe.copy_out(sizeof passed, peer.kept.data(), payload);
    pipe.consume(sizeof passed + payload);
    peer.payload = peer.kept.data();
    if (Part mine = part(origin, context_.rank); relayed_ && mine.bytes) peer.payload += mine.offset;
    peer.heard = true;
    known_.push_back(origin);
    --*awaited;
  }
  return Step::Done;
}

Step Matching::mismatch(int from) {
  std::string text = "collective #" + std::to_string(number()) + " differs between ranks:";
  for (int p = 0; p < context_.nranks; ++p)
    if (p == from || peers_[size_t(p)].heard)
      text += (text.back() == ':' ? " rank " : "; rank ") + std::to_string(p) + " called " + header(p).str();
  return context_.mismatch(text);
}

// The part of a rank's send buffer that another one gets.
Part Matching::part(int from, int to) const { return part_for(op_->func, op_->root, op_->bytes(), from, to); }

// What is passed on with the header of `origin`.
Part Matching::passed_part(int origin, int to) const {
  if (!mine_.is_inline) return {0, 0};
  return relayed_ ? Part{0, needed_of(*op_, origin, context_.nranks)} : part(origin, to);
}

std::vector<int> Matching::missing() const {
  std::vector<int> ranks;
  auto heard = [&](int p) { return peers_[size_t(p)].heard; };
  for (int p = 0; p < int(peers_.size()); ++p) {
    if (heard(p)) continue;
    std::vector<int> bearers = here(p) ? std::vector<int>() : routes().bearers(p);
    if (std::all_of(bearers.begin(), bearers.end(), heard)) ranks.push_back(p);
  }
  return ranks;
}

}  // namespace pncpu
