#include "ops/moves.hpp"

#include <algorithm>

namespace pncpu {
namespace {

template <class Some>
Step move_slice(size_t bytes, size_t* done, Some&& some) {
  size_t end = std::min(bytes, *done + kSlice), before = *done;
  while (*done < end) {
    size_t n = some(*done, end - *done);
    if (n == 0) break;
    *done += n;
  }
  return *done == bytes ? Step::Done : *done > before ? Step::Moved : Step::Blocked;
}

}  // namespace

Step pipe_out(Pipe& pipe, const char* from, size_t bytes, size_t* done) {
  return move_slice(bytes, done, [&](size_t at, size_t n) { return pipe.write(from + at, n); });
}

Step pipe_in(Pipe& pipe, char* to, size_t bytes, size_t* done) {
  return move_slice(bytes, done, [&](size_t at, size_t n) { return pipe.read(to + at, n); });
}

Step direct_in(const Context& context, int peer, uint64_t from, char* to, size_t bytes, size_t* done,
               bool identify, const char* doing) {
  size_t n = std::min(bytes - *done, kSlice);
  RemoteResult r = context.link(peer).read(to + *done, from + *done, n, identify);
  if (r == RemoteResult::Closed) return Step::Blocked;  // the peer has failed; its error will arrive
  if (r != RemoteResult::Ok) return direct_failed(context, peer, r, doing);
  *done += n;
  return *done == bytes ? Step::Done : Step::Moved;
}

Step direct_out(const Context& context, int peer, const char* from, uint64_t to, size_t bytes, size_t* done,
                const char* doing) {
  size_t n = std::min(bytes - *done, kSlice);
  RemoteResult r = context.link(peer).write(from + *done, to + *done, n);
  // A failed peer needs no data; its error will arrive.
  if (r != RemoteResult::Ok && r != RemoteResult::Closed) return direct_failed(context, peer, r, doing);
  *done += n;
  return *done == bytes ? Step::Done : Step::Moved;
}

Step mapped_in(const Context& context, int peer, const char* from, char* to, size_t bytes, size_t* done) {
  size_t n = std::min(bytes - *done, kSlice);
  // A peer that refuses has failed; its error will arrive.
  if (!context.link(peer).copy(to + *done, from + *done, n)) return Step::Blocked;
  *done += n;
  return *done == bytes ? Step::Done : Step::Moved;
}

Step mapped_out(const Context& context, int peer, const char* from, char* to, size_t bytes, size_t* done) {
  size_t n = std::min(bytes - *done, kSlice);
  context.link(peer).copy(to + *done, from + *done, n);  // a failed peer needs no data
  *done += n;
  return *done == bytes ? Step::Done : Step::Moved;
}

Step direct_failed(const Context& context, int peer, RemoteResult result, const char* doing) {
  std::string who = context.who(peer), me = "rank " + std::to_string(context.rank);
  if (result == RemoteResult::Gone)
    return context.fail(ncclRemoteError, who + " died while " + me + " used its buffer in " + doing);
  if (result == RemoteResult::Denied)
    return context.fail(ncclSystemError, "the kernel no longer lets " + me + " use the memory of " + who +
                                             "; PYNCCL_CPU_DIRECT=0 avoids such access");
  return context.fail(ncclInvalidArgument, "a buffer that " + who + " or " + me + " passed to " + doing +
                                               " is not as large as its count says, or not accessible");
}

}  // namespace pncpu
