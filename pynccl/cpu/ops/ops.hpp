// One call of the API, from the caller to the stream that runs it.
#pragma once

#include <memory>
#include <string>

#include "base/core.hpp"
#include "reduce/reduce.hpp"

namespace pncpu {

enum class Func : uint8_t {
  AllReduce,
  Reduce,
  Broadcast,
  AllGather,
  ReduceScatter,
  AlltoAll,
  Gather,
  Scatter,
  Send,
  Recv,
  PutSignal,
  Signal,
  WaitSignal
};
const char* func_name(Func);
inline bool is_p2p(Func f) { return f == Func::Send || f == Func::Recv; }
inline bool is_one_sided(Func f) { return f >= Func::PutSignal; }
inline bool is_collective(Func f) { return f < Func::Send; }
inline bool reduces(Func f) { return f == Func::AllReduce || f == Func::Reduce || f == Func::ReduceScatter; }
inline bool has_root(Func f) {
  return f == Func::Reduce || f == Func::Broadcast || f == Func::Gather || f == Func::Scatter;
}

// Programs do not count the exchange that opens the control channel.
constexpr int kChannelExchange = pyncclCpuOpenChannel, kLastExchange = pyncclCpuOpenChannel;

struct OneSidedCall;

struct Op {
  Func func = Func::AllReduce;
  RedKind red = RedKind::Sum;
  ncclDataType_t dtype = ncclInt8;
  int root = 0;  // the peer of a message; the purpose of an exchange, which is an AllGather
  size_t count = 0;
  const void* send = nullptr;
  void* recv = nullptr;
  PreMul scalar{};
  uint64_t number = 0;  // counts the collectives; or the sends, receives or signals to the peer, from 1
  const void* scalar_at = nullptr;  // ncclScalarDevice: read when the operation runs
  std::shared_ptr<OneSidedCall> one_sided;
  size_t stride = 0;  // bytes from the block of one rank to that of the next, if not bytes()
  size_t bytes() const { return count * type_size(dtype); }
};

// The part of the send buffer of rank `from` that rank `to` needs in a collective of `bytes` (Op::bytes()).
struct Part {
  size_t offset, bytes;
};
Part part_for(Func func, int root, size_t bytes, int from, int to);

constexpr uint32_t kSendLent = 1, kRecvLent = 2;

// A rank sends this before the data of a collective or message. Equal calls have equal first five fields.
struct Header {
  uint8_t func = 0, dtype = 0, red = 0, is_inline = 0;
  int32_t root = 0;
  uint64_t count = 0;
  uint64_t seq = 0;
  uint64_t send = 0, recv = 0;  // addresses for direct access
  uint64_t windows = 0;         // Mappings::id()
  PreMul scalar{};
  uint32_t payload = 0;  // bytes that follow the header
  uint32_t lent = 0;     // kSendLent, kRecvLent: the receiver maps that registered buffer
  bool same_call(const Header& o) const {
    return func == o.func && dtype == o.dtype && red == o.red && root == o.root && count == o.count;
  }
  std::string str() const;
};
Header header_of(const Op& op, uint64_t seq);

enum class Step { Done, Moved, Blocked, Failed };

}  // namespace pncpu
