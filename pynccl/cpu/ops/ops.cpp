#include "ops/ops.hpp"

#include <utility>

#include "ops/context.hpp"

namespace pncpu {

const char* func_name(Func f) {
  static const char* const names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter",
                                      "AlltoAll",  "Gather", "Scatter",   "Send",      "Recv",
                                      "PutSignal", "Signal", "WaitSignal"};
  return size_t(f) < sizeof names / sizeof *names ? names[size_t(f)] : "?";
}

Part part_for(Func func, int root, size_t bytes, int from, int to) {
  switch (func) {
    case Func::Reduce:
    case Func::Gather:
      return {0, to == root ? bytes : 0};
    case Func::Broadcast:
      return {0, from == root ? bytes : 0};
    case Func::Scatter:
      return {size_t(to) * bytes, from == root ? bytes : 0};
    case Func::ReduceScatter:
    case Func::AlltoAll:
      return {size_t(to) * bytes, bytes};
    default:
      return {0, bytes};
  }
}

std::string Header::str() const {
  static const char* const exchanges[] = {
      "AllGather", "CommWindowRegister", "CommWindowDeregister",
      "the control channel (all ranks need timeout= or check mode, or none)"};
  if (Func(func) == Func::AllGather && root > 0 && root <= kLastExchange) return exchanges[root];
  // The barrier of pynccl.Communicator.
  if (Func(func) == Func::AllReduce && count == 1 && dtype == ncclUint8 && red == uint8_t(RedKind::Max))
    return "AllReduce(count 1, uint8, max: a barrier)";
  std::string text = std::string(func_name(Func(func))) + "(count " + std::to_string(count) + ", " +
                     type_name(ncclDataType_t(dtype));
  if (reduces(Func(func)))
    text += std::string(", ") + (red <= uint8_t(RedKind::PreMulSum) ? op_name(RedKind(red)) : "?");
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

void Context::hear_pipes() {
  for (Link* link : links)
    for (int c = 0; link && c < kChannels; ++c)
      if (link->pipe[c]) link->pipe[c]->tell(&news);
}

void Context::ring_peers() const {
  if (!std::exchange(news.moved, false)) return;
  for (Link* link : links)
    if (link && link->take_moved()) link->ring();
}

void Context::ring_host() const {
  for (Link* link : links)
    if (link) link->ring();
}

Step Context::blocked(Channel channel) const {
  if (!news.fault) return Step::Blocked;
  for (int p = 0; p < nranks; ++p)
    if (const char* fault = p == rank ? nullptr : link(p).pipe[channel]->fault())
      return fail(ncclInternalError, who(p) + " corrupted the memory that it shares with rank " +
                                         std::to_string(rank) + ": " + fault);
  return Step::Blocked;
}

}  // namespace pncpu
