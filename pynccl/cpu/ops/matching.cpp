#include "ops/matching.hpp"

#include "service/wire.hpp"

namespace pncpu {

static_assert(sizeof(Header) == sizeof(Notice::head), "a notice holds a header");
static_assert(size_t(kMostRanks) <= Board::kMostData, "a byte for each rank fits a board's data");

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

size_t most_with_header(const Context& context, Func func) {
  // A rank's send buffer has this many parts of the call's size.
  size_t parts = part_for(func, 0, 1, 0, context.nranks - 1).offset + 1;
  return std::min(context.inline_bytes, Board::kMostData / parts);
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
  size_t bytes = op.bytes();
  // The exchange itself has the number of the program's next call.
  if (is_channel(mine_)) ++uncounted_;
  op_ = &op;
  shown_ = lends_ = false;
  mine_ = header_of(op, seq);
  mine_.windows = windows;
  mine_.is_inline = bytes <= most_with_header(context_, op.func);
  peers_.resize(size_t(context_.nranks));
  for (int p = 0; p < context_.nranks; ++p) {
    Peer& peer = peers_[size_t(p)];
    peer.heard = p == context_.rank;
    peer.told = peer.heard || context_.link(p).board;
    peer.lent = lent[size_t(p)];
    lends_ = lends_ || peer.lent;
    peer.out = {0, 0};
    peer.in = 0;
    peer.payload = nullptr;
    if (!mine_.is_inline || p == context_.rank) continue;
    peer.out = part_for(op.func, op.root, bytes, context_.rank, p);
    peer.in = part_for(op.func, op.root, bytes, p, context_.rank).bytes;
  }
  peers_[size_t(context_.rank)].header = mine_;
}

Step Matching::step() {
  bool shows = show(), told = announce(), all_here = true;
  context_.ring_peers();  // before the reduction that may follow, so that the peers need not wait for it
  Step heard = hear(&all_here);
  // The last rank of the host that shows its call wakes the others; nothing changes for them before.
  if (shows && all_here) context_.ring_host();
  if (heard == Step::Blocked || (heard == Step::Done && !told)) return context_.blocked(kColl);
  return heard;
}

// True: the ranks of this host see the header from now on.
bool Matching::show() {
  if (shown_ || !context_.board) return false;
  Header header = mine_;
  char* data = nullptr;
  if (mine_.is_inline) {
    header.payload = uint32_t(needed_of(*op_, context_.rank, context_.nranks));
    data = context_.board.data(mine_.seq, header.payload);
    if (header.payload) memcpy(data, op_->send, header.payload);
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

bool Matching::announce() {
  bool all = true;
  for (int i = 1; i < context_.nranks; ++i) {
    int p = (context_.rank + i) % context_.nranks;
    Peer& peer = peers_[size_t(p)];
    Pipe& pipe = *context_.link(p).pipe[kColl];
    if (!peer.told) {
      Header header = mine_;
      header.payload = uint32_t(peer.out.bytes);
      header.lent = peer.lent;
      const char* payload = peer.out.bytes ? static_cast<const char*>(op_->send) + peer.out.offset : nullptr;
      peer.told = pipe.put(&header, sizeof header, payload, peer.out.bytes);
    }
    all = peer.told && pipe.flush() && all;
  }
  return all;
}

Step Matching::hear(bool* all_here) {
  bool all = true;
  for (int p = 0; p < context_.nranks; ++p) {
    Peer& peer = peers_[size_t(p)];
    if (peer.heard) continue;
    bool here = bool(context_.link(p).board);
    Step s = here ? look_at(p, peer) : hear(p, peer);
    if (s == Step::Failed) return s;
    all = all && s == Step::Done;
    *all_here = *all_here && (!here || s == Step::Done);
  }
  return all ? Step::Done : Step::Blocked;
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
    peer.payload = data + part_for(op_->func, op_->root, op_->bytes(), p, context_.rank).offset;
  else
    peer.header.lent = payload ? uint32_t(data[context_.rank]) : 0;
  peer.heard = true;
  return Step::Done;
}

Step Matching::hear(int p, Peer& peer) {
  Pipe& pipe = *context_.link(p).pipe[kColl];
  size_t readable = hear_header(pipe, &peer.header);
  if (readable == 0) return Step::Blocked;
  if (!peer.header.same_call(mine_)) return mismatch(p);
  Step sound = check_header(context_, p, peer.header, mine_.seq, mine_.is_inline, peer.in);
  if (sound == Step::Failed) return sound;
  if (readable < sizeof peer.header + peer.in) {
    if (pipe.reserve(sizeof peer.header + peer.in)) return Step::Blocked;
    return context_.fail(ncclInternalError, std::to_string(peer.in) + " bytes from " + context_.who(p) +
                                                " do not fit into their pipe at once");
  }
  if (!mine_.is_inline) pipe.consume(sizeof peer.header);
  peer.heard = true;
  return Step::Done;
}

Step Matching::mismatch(int from) {
  std::string text = "collective #" + std::to_string(number()) + " differs between ranks:";
  for (int p = 0; p < context_.nranks; ++p)
    if (p == from || peers_[size_t(p)].heard)
      text += (text.back() == ':' ? " rank " : "; rank ") + std::to_string(p) + " called " + header(p).str();
  return context_.mismatch(text);
}

const char* Matching::payload(int p) {
  Peer& peer = peers_[size_t(p)];
  if (peer.payload) return peer.payload;
  Pipe& pipe = *context_.link(p).pipe[kColl];
  Span span = pipe.peek();
  if (span.size >= sizeof peer.header + peer.in) return peer.payload = span.data + sizeof peer.header;
  peer.whole.resize(std::max(peer.whole.size(), peer.in));
  pipe.copy_out(sizeof peer.header, peer.whole.data(), peer.in);
  return peer.payload = peer.whole.data();
}

void Matching::release() {
  for (int p = 0; p < context_.nranks; ++p)
    if (p != context_.rank && mine_.is_inline && !context_.link(p).board)
      context_.link(p).pipe[kColl]->consume(sizeof(Header) + peers_[size_t(p)].in);
}

std::vector<int> Matching::missing() const {
  std::vector<int> ranks;
  for (int p = 0; p < int(peers_.size()); ++p)
    if (!peers_[size_t(p)].heard) ranks.push_back(p);
  return ranks;
}

}  // namespace pncpu
