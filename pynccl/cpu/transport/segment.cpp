#include "transport/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "base/fork.hpp"

namespace pncpu {
namespace {

constexpr size_t kLeastRing = 512, kMostRing = size_t(1) << 30;  // fits a header and some data
constexpr size_t kMostShown = size_t(1) << 20;
constexpr int kMostRanks = 1 << 15;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// What the rings and the boards of all ranks may take together. With `kMany` ranks a host is full of them,
// and 128 share 64 MiB in all.
struct Limits {
  size_t rings, shown;
};
constexpr int kMany = 65;
constexpr Limits limits(int ranks) {
  constexpr size_t mib = 1 << 20;
  return ranks < kMany ? Limits{256 * mib, 64 * mib} : Limits{32 * mib, 16 * mib};
}

}  // namespace

Segment::Segment(int ranks, size_t ring_bytes, size_t coll_factor)
    : ranks_(ranks), ring_bytes_(ring_bytes), coll_factor_(coll_factor) {
  bool sound = ranks > 0 && ranks <= kMostRanks && ring_bytes >= kLeastRing && ring_bytes <= kMostRing &&
               (ring_bytes & (ring_bytes - 1)) == 0;
  if (!sound) return;
  size_t pairs = size_t(ranks) * size_t(ranks), rings = pairs * kChannels;
  Limits most = limits(ranks);
  while (ring_bytes_ > kLeastRing && pairs * pair_bytes() > most.rings) ring_bytes_ /= 2;
  states_at_ = align_up(sizeof(Cell) * size_t(ranks), 4096);
  signals_at_ = states_at_ + align_up(sizeof(RingState) * rings, 4096);
  counters_at_ = signals_at_ + align_up(sizeof(Signals) * pairs, 4096);
  notices_at_ = counters_at_ + align_up(sizeof(uint64_t) * kCounters * pairs, 4096);
  shown_at_ = notices_at_ + align_up(2 * sizeof(Notice) * size_t(ranks), 4096);
  // At least a byte for each rank.
  shown_bytes_ = std::max(align_up(size_t(ranks), 4096),
                          std::min(kMostShown, most.shown / (2 * size_t(ranks)) & ~size_t(4095)));
  data_at_ = shown_at_ + 2 * shown_bytes_ * size_t(ranks);
  bytes_ = data_at_ + pairs * pair_bytes();
}

ncclResult_t Segment::create() {
  fd_ = Fd::made_by([] { return memfd_create("pynccl", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (!fd_) return fail(ncclSystemError, "memfd_create: %s", describe_error(errno).c_str());
  if (ftruncate(fd_.get(), off_t(bytes_)) != 0)
    return fail(ncclSystemError, "cannot size the shared segment to %zu bytes: %s", bytes_, strerror(errno));
  if (fcntl(fd_.get(), F_ADD_SEALS, kSeals) != 0)
    return fail(ncclSystemError, "cannot seal the shared segment: %s", strerror(errno));
  return map();
}

ncclResult_t Segment::open(Fd fd) {
  fd_ = std::move(fd);
  return map();
}

ncclResult_t Segment::map() {
  if (bytes_ == 0)
    return fail(
        ncclInternalError,
        "a shared segment for %d ranks with rings of %zu bytes: expected 1 to %d ranks and a power of "
        "two from %zu to %zu bytes",
        ranks_, ring_bytes_, kMostRanks, kLeastRing, kMostRing);
  struct stat st;
  if (fstat(fd_.get(), &st) != 0)
    return fail(ncclSystemError, "cannot look at the shared segment: %s", strerror(errno));
  if (uint64_t(st.st_size) != bytes_)
    return fail(ncclSystemError, "the shared segment has %lld bytes, expected %zu",
                static_cast<long long>(st.st_size), bytes_);
  int seals = fcntl(fd_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    return fail(ncclSystemError, "the shared segment's size is not sealed: seals are %d, expected %d", seals,
                kSeals);
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (at == MAP_FAILED)
    return fail(ncclSystemError, "cannot map %zu bytes of shared memory: %s", bytes_, strerror(errno));
  madvise(at, bytes_, MADV_DONTFORK);
  base_ = static_cast<char*>(at);
  return ncclSuccess;
}

Segment::~Segment() {
  if (base_) munmap(base_, bytes_);
}

Ring Segment::ring(int from, int to, int channel) const {
  size_t index = pair(from, to) * kChannels + size_t(channel);
  char* data = base_ + data_at_ + pair(from, to) * pair_bytes();
  return {reinterpret_cast<RingState*>(base_ + states_at_) + index,
          channel == kColl ? data : data + ring_bytes(kColl)};
}

void Segment::attach(int me, int peer, Link* link) const {
  link->cell = &cell(peer);
  link->board = board(peer);
  link->mine = &signals(me, peer);
  link->theirs = &signals(peer, me);
  link->counters_out = counters(me, peer);
  link->counters_in = counters(peer, me);
  for (int c = 0; c < kChannels; ++c)
    link->pipe[c] = ring_pipe(ring(me, peer, c), ring(peer, me, c), ring_bytes(c));
}

void Segment::release_rings() {
  fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(data_at_), off_t(rings_bytes()));
}

}  // namespace pncpu
