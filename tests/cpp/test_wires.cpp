// Between hosts and between many ranks of a process: messages as large as the settings let them be, and more
// connections than there are descriptors.
#include <sys/resource.h>

#include "ranks.hpp"

using namespace testing;

namespace {

constexpr size_t kMiB = size_t(1) << 20;

std::vector<float> filled(size_t count, float value) { return std::vector<float>(count, value); }

void check_all(const std::vector<float>& got, size_t from, size_t count, float want) {
  size_t wrong = 0;
  for (size_t i = from; i < from + count; ++i) wrong += got[i] != want;
  CHECK_EQ(wrong, size_t(0));
}

void collectives(ncclComm_t comm, int nranks, int rank, size_t count) {
  std::vector<float> x = filled(count, float(rank + 1)), all = filled(count * size_t(nranks), 0);
  float total = float(nranks * (nranks + 1)) / 2;
  at_step("rank %d: all_gather of %zu", rank, count);
  OK(ncclAllGather(x.data(), all.data(), count, ncclFloat32, comm, nullptr));
  OK(synchronize(comm));
  for (int r = 0; r < nranks; ++r) check_all(all, size_t(r) * count, count, float(r + 1));
  at_step("rank %d: all_to_all of %zu", rank, count);
  std::vector<float> got = filled(all.size(), 0);
  OK(ncclAlltoAll(all.data(), got.data(), count, ncclFloat32, comm, nullptr));
  OK(synchronize(comm));
  check_all(got, 0, got.size(), float(rank + 1));
  at_step("rank %d: broadcast of %zu", rank, count);
  std::vector<float> sent = filled(count, rank == nranks - 1 ? 7.0f : 0.0f);
  OK(ncclBcast(sent.data(), count, ncclFloat32, nranks - 1, comm, nullptr));
  OK(synchronize(comm));
  check_all(sent, 0, count, 7);
  at_step("rank %d: all_reduce of %zu", rank, count);
  OK(sum(x.data(), count, comm));
  OK(synchronize(comm));
  check_all(x, 0, count, total);
}

// Every rank sends to every other and receives from it, all at once, twice.
void exchanges(ncclComm_t comm, int nranks, int rank, size_t count) {
  at_step("rank %d: send and receive %zu", rank, count);
  std::vector<float> out = filled(count, float(rank + 1)), in = filled(2 * count * size_t(nranks), 0);
  OK(ncclGroupStart());
  for (int peer = 0; peer < nranks; ++peer)
    for (int i = 0; i < 2 && peer != rank; ++i) {
      OK(ncclSend(out.data(), count, ncclFloat32, peer, comm, nullptr));
      OK(ncclRecv(in.data() + size_t(2 * peer + i) * count, count, ncclFloat32, peer, comm, nullptr));
    }
  OK(ncclGroupEnd());
  OK(synchronize(comm));
  for (int peer = 0; peer < nranks; ++peer)
    if (peer != rank) check_all(in, size_t(2 * peer) * count, 2 * count, float(peer + 1));
}

// Around the size up to which a message travels in its announcement.
void sizes_around(size_t bytes, int nranks, bool own_hosts) {
  set("PYNCCL_CPU_INLINE_BYTES", std::to_string(bytes).c_str());
  set("PYNCCL_CPU_TIMEOUT", "20");
  ncclUniqueId id = new_id();
  as_processes(nranks, [&](int rank) {
    if (own_hosts) set("NCCL_HOSTID", std::to_string(rank).c_str());
    alarm(100);
    ncclComm_t comm = nullptr;
    if (!OK(ncclCommInitRank(&comm, nranks, id, rank))) return;
    for (size_t count : {bytes / 4, bytes / 4 - 1, bytes / 4 + 1, bytes / 4 - 64, bytes / 8}) {
      if (failures) break;
      collectives(comm, nranks, rank, count);
      exchanges(comm, nranks, rank, count);
    }
    OK(ncclCommDestroy(comm));
  });
}

// The most that comes with the header of a collective.
TEST_CASE("collectives with their data in headers between hosts") { sizes_around(kMiB / 4, 3, true); }
TEST_CASE("collectives with their data in shared memory") { sizes_around(kMiB / 4, 3, false); }
TEST_CASE("large inline messages between hosts") { sizes_around(kMiB, 3, true); }
TEST_CASE("large inline messages between hosts with large rings") {
  set("PYNCCL_CPU_RING_BYTES", "4194304");
  sizes_around(kMiB, 3, true);
}
TEST_CASE("larger inline messages between hosts with large rings") {
  set("PYNCCL_CPU_RING_BYTES", "8388608");
  sizes_around(4 * kMiB, 2, true);
}
TEST_CASE("large inline messages in shared memory") {
  set("PYNCCL_CPU_DIRECT", "0");
  set("PYNCCL_CPU_RING_BYTES", "4194304");
  sizes_around(kMiB, 3, false);
}
TEST_CASE("inline messages as large as the ring") {
  set("PYNCCL_CPU_RING_BYTES", "1048576");
  sizes_around(kMiB, 2, true);
}

// As threads of one process, 40 ranks need far fewer descriptors than pairs of ranks; or are told what they
// lack.
TEST_CASE("many ranks with few descriptors") {
  constexpr int kRanks = 40;
  set("PYNCCL_CPU_INIT_TIMEOUT", "30");
  rlimit before, few;
  getrlimit(RLIMIT_NOFILE, &before);
  few = before;
  few.rlim_cur = 256;
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  ncclUniqueId id = new_id();
  Meeting all_made(kRanks), all_used(kRanks);
  std::atomic<int> made{0}, named{0};
  as_threads(kRanks, [&](int rank) {
    ncclComm_t comm = nullptr;
    ncclResult_t r = ncclCommInitRank(&comm, kRanks, id, rank);
    std::string text = last_error();
    bool ok = r == ncclSuccess;
    bool names = contains(text, "RLIMIT_NOFILE") || contains(text, "ulimit");
    if (!ok) {
      CHECK(!contains(text, "died"));
      CHECK_EQ(std::string(name_of(r)), std::string("ncclSystemError"));
      CHECK_MESSAGE(names, "rank ", rank, ": ", text);
    }
    made += ok;
    named += names;
    all_made();
    if (made == kRanks) {
      float x = 1;
      OK(sum(&x, 1, comm));
      OK(synchronize(comm, nullptr, 60000));
      CHECK_EQ(x, float(kRanks));
    }
    all_used();
    OK(ncclCommAbort(comm));
  });
  CHECK((made == kRanks || named > 0));
  setrlimit(RLIMIT_NOFILE, &before);
  ncclComm_t comm = alone();
  float x = 1;
  OK(sum(&x, 1, comm));
  OK(synchronize(comm, nullptr, 20000));
  OK(ncclCommDestroy(comm));
}

}  // namespace
