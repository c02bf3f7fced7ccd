// Whoever aborts has its buffers back: no peer reads or writes them any more, so they may be unmapped at
// once.
#include <sys/mman.h>

#include <random>

#include "ranks.hpp"

using namespace testing;

namespace {

constexpr int kRanks = 3;
constexpr size_t kCount = size_t(1) << 20, kPart = kCount / kRanks;

// Memory that is gone for good when it ends: an access then is a SIGSEGV.
class Mapped {
 public:
  Mapped() : at_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    CHECK(at_ != MAP_FAILED);
    std::fill_n(data(), kCount, 1.0f);
  }
  ~Mapped() { munmap(at_, kBytes); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  float* data() const { return static_cast<float*>(at_); }

 private:
  static constexpr size_t kBytes = kCount * sizeof(float);
  void* at_;
};

struct Buffers {
  Mapped in, out;
};

using Issue = ncclResult_t (*)(const Buffers&, int rank, ncclComm_t);

ncclResult_t all_reduce(const Buffers& b, int, ncclComm_t comm) {
  return ncclAllReduce(b.in.data(), b.out.data(), kCount, ncclFloat32, ncclSum, comm, nullptr);
}
ncclResult_t reduce(const Buffers& b, int, ncclComm_t comm) {
  return ncclReduce(b.in.data(), b.out.data(), kCount, ncclFloat32, ncclMax, 1, comm, nullptr);
}
ncclResult_t broadcast(const Buffers& b, int, ncclComm_t comm) {
  return ncclBroadcast(b.in.data(), b.out.data(), kCount, ncclFloat32, 0, comm, nullptr);
}
ncclResult_t all_gather(const Buffers& b, int, ncclComm_t comm) {
  return ncclAllGather(b.in.data(), b.out.data(), kPart, ncclFloat32, comm, nullptr);
}
ncclResult_t around(const Buffers& b, int rank, ncclComm_t comm) {
  ncclResult_t r = ncclGroupStart();
  if (r == ncclSuccess) r = ncclSend(b.in.data(), kCount, ncclFloat32, (rank + 1) % kRanks, comm, nullptr);
  if (r == ncclSuccess)
    r = ncclRecv(b.out.data(), kCount, ncclFloat32, (rank + kRanks - 1) % kRanks, comm, nullptr);
  ncclResult_t ended = ncclGroupEnd();
  return r == ncclSuccess ? ended : r;
}

constexpr struct {
  const char* name;
  Issue issue;
} kCalls[] = {{"AllReduce", all_reduce},
              {"Reduce", reduce},
              {"Broadcast", broadcast},
              {"AllGather", all_gather},
              {"Send and Recv", around}};

void wait_microseconds(unsigned us) {
  for (Stopwatch watch; watch.seconds() * 1e6 < us;) sched_yield();
}

// In each round one rank aborts at a moment of its own; the others wait, fail or succeed, and abort.
void aborts_and_unmaps(ncclUniqueId id, int rank, int round, Issue issue) {
  std::mt19937 random{unsigned(round)};
  bool aborts = int(random() % kRanks) == rank;
  unsigned after = unsigned(random() % 3000);
  ncclComm_t comm = nullptr;
  if (!OK(ncclCommInitRank(&comm, kRanks, id, rank))) return;
  Buffers buffers;
  ncclResult_t r = issue(buffers, rank, comm);  // a peer may have aborted before
  if (aborts)
    wait_microseconds(after);
  else if (r == ncclSuccess)
    r = synchronize(comm, nullptr, 20000);
  CHECK((r == ncclSuccess || r == ncclRemoteError || r == ncclInvalidUsage));
  OK(ncclCommAbort(comm));
}

using AsRanks = void (*)(int nranks, const std::function<void(int rank)>& body);

void in_rounds(int rounds, AsRanks as_ranks) {
  for (int round = 0; round < rounds && failures == 0; ++round) {
    auto& [name, issue] = kCalls[size_t(round) % std::size(kCalls)];
    at_step("round %d: %s", round, name);
    ncclUniqueId id = new_id();
    as_ranks(kRanks, [&, call = issue](int rank) { aborts_and_unmaps(id, rank, round, call); });
  }
}

TEST_CASE("by threads") { in_rounds(scaled(400, 100, 50), as_threads); }

// What another process reads of memory that is gone is an error of the reader's; it must not be told that a
// buffer was too small.
TEST_CASE("by processes") { in_rounds(scaled(100, 20, 10), as_processes); }

}  // namespace
