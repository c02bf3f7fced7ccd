// The limits of a process, of its descriptors and threads, and of what the library takes: the numbers of
// ranks.
#include <sys/resource.h>

#include <utility>

#include "job.hpp"
#include "service/wire.hpp"

using namespace testing;
using namespace pncpu;

namespace {

TEST_CASE("no thread for the service") {
  if (geteuid() == 0) {
    CHECK_EQ(setgid(65534), 0);
    CHECK_EQ(setuid(65534), 0);
  }
  rlimit none{0, 0}, before{};
  getrlimit(RLIMIT_NPROC, &before);
  none.rlim_max = before.rlim_max;
  CHECK_EQ(setrlimit(RLIMIT_NPROC, &none), 0);
  int descriptors = open_descriptors();
  ncclUniqueId id;
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclSystemError));
  CHECK(contains(ncclGetLastError(nullptr), "no thread can be started"));
  CHECK(contains(ncclGetLastError(nullptr), "RLIMIT_NPROC"));
  CHECK_EQ(open_descriptors(), descriptors);
  CHECK_EQ(setrlimit(RLIMIT_NPROC, &before), 0);
  run_job(2);
}

// Ranks that need more descriptors than they may have say so, and nobody is taken for dead.
TEST_CASE("too few descriptors for the peers") {
  constexpr int kRanks = 24;
  set("PYNCCL_CPU_INIT_TIMEOUT", "20");
  ncclUniqueId id = settled_id();
  Gate gate;
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < kRanks; ++r)
    ranks.push_back(std::make_unique<Child>([&, r] {
      gate.wait();
      limit_descriptors(rlim_t(open_descriptors()) + 20);
      ncclComm_t comm = nullptr;
      CHECK_EQ(int(ncclCommInitRank(&comm, kRanks, id, r)), int(ncclSystemError));
      std::string text = ncclGetLastError(nullptr);
      SAYS(text, "needs 25 file descriptors for its peers");
      SAYS(text, "RLIMIT_NOFILE");
    }));
  gate.open(kRanks);
  for (auto& rank : ranks) CHECK_EQ(rank->wait(), 0);
}

// The root of the id is this process. It cannot accept the other ranks, and nobody waits for the time-out.
TEST_CASE("no descriptor for the root of an id") {
  ncclUniqueId id = settled_id();
  auto is_told = [&](int r) {
    ncclComm_t comm = nullptr;
    RESULT(ncclCommInitRank(&comm, 3, id, r), ncclSystemError);
    std::string text = ncclGetLastError(nullptr);
    SAYS(text, "no rank can connect to the root of the unique id (pid ");
    SAYS(text, "Too many open files");
    CHECK(!contains(text, "missing"));
  };
  Gate gate;
  std::vector<std::unique_ptr<Child>> others;
  for (int r : {1, 2})
    others.push_back(std::make_unique<Child>([&, r] {
      gate.wait();
      is_told(r);
    }));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  int lowest = dup(0);
  close(lowest);
  limit_descriptors(rlim_t(lowest));
  gate.open(2);
  double began = now();
  is_told(0);
  CHECK(now() - began < 20);
  for (auto& other : others) CHECK_EQ(other->wait(), 0);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  run_job(2);
}

// One of ranks that all have hosts of their own.
ncclComm_t on_its_host(int nranks, const ncclUniqueId& id, int rank) {
  set("NCCL_HOSTID", std::to_string(rank).c_str());
  ncclComm_t comm = nullptr;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  return comm;
}

ncclResult_t message(ncclComm_t comm, bool sends, int peer) {
  static std::vector<float> x(1000, 1);
  ncclResult_t r = sends ? ncclSend(x.data(), x.size(), ncclFloat32, peer, comm, nullptr)
                         : ncclRecv(x.data(), x.size(), ncclFloat32, peer, comm, nullptr);
  return r == ncclSuccess ? pyncclCpuStreamSynchronize(comm, nullptr, 20000) : r;
}

// The rendezvous has connections that its service ends later.
int settled_descriptors() {
  int now = open_descriptors();
  for (int same = 0; same < 3;) {
    pause_for(0.2);
    const int before = std::exchange(now, open_descriptors());
    same = now == before ? same + 1 : 0;
  }
  return now;
}

TEST_CASE("a data connection is made when it is first needed") {
  constexpr int kRanks = 4;
  for (bool rises : {true, false}) {
    const int from = rises ? 1 : 2, to = rises ? 2 : 1;
    ncclUniqueId id = settled_id();
    Gate gates[kRanks];
    as_processes(kRanks, [&](int rank) {
      auto meet = [&] {
        for (Gate& gate : gates) gate.open(1);
        for (int i = 0; i < kRanks; ++i) gates[rank].wait();
      };
      ncclComm_t comm = on_its_host(kRanks, id, rank);
      const int before = settled_descriptors();
      meet();
      const bool takes_part = rank == from || rank == to;
      for (int i = 0; i < 2 && takes_part; ++i) OK(message(comm, rank == from, rank == from ? to : from));
      meet();
      CHECK_EQ(open_descriptors() - before, int(takes_part));
      meet();
      run_rank(comm, kRanks);
    });
  }
}

// It is made in a call. Neither rank waits for its time-out, nor takes the other for dead.
TEST_CASE("no descriptor for a data connection") {
  for (int poor : {0, 1}) {
    for (int sender : {0, 1}) {
      at_step("rank %d has none, rank %d sends", poor, sender);
      ncclUniqueId id = settled_id();
      Gate gate, told[2];
      as_processes(2, [&](int rank) {
        ncclComm_t comm = on_its_host(2, id, rank);
        settled_descriptors();
        if (rank == poor) {
          int lowest = dup(0);
          close(lowest);
          limit_descriptors(rlim_t(lowest));
          gate.open(1);
        } else {
          gate.wait();
        }
        double began = now();
        ncclResult_t r = message(comm, rank == sender, 1 - rank);
        RESULT(r, rank == poor ? ncclSystemError : ncclRemoteError);
        CHECK(now() - began < 10);
        std::string text = ncclGetLastError(comm);
        SAYS(text, "cannot connect to rank " + std::to_string(1 - poor));
        SAYS(text, "Too many open files");
        // A message to a rank that has gone is dropped, and that is no error.
        told[1 - rank].open(1);
        told[rank].wait();
        OK(ncclCommAbort(comm));
      });
    }
  }
}

TEST_CASE("ranks as threads need no descriptors") {
  limit_descriptors(64);
  ncclUniqueId id = settled_id();
  Gauge gauge;
  std::vector<std::thread> ranks;
  for (int r = 0; r < 40; ++r) ranks.emplace_back([&, r] { take_part(id, 40, r); });
  for (std::thread& t : ranks) t.join();
  CHECK(open_descriptors() <= gauge.descriptors + 4);
}

TEST_CASE("many ranks in one process") {
  std::vector<ncclComm_t> comms(200, nullptr);
  limit_descriptors(64);
  OK(ncclCommInitAll(comms.data(), 200, nullptr));
  std::vector<float> x(200, 1);
  OK(ncclGroupStart());
  for (size_t i = 0; i < comms.size(); ++i)
    OK(ncclAllReduce(&x[i], &x[i], 1, ncclFloat32, ncclSum, comms[i], nullptr));
  OK(ncclGroupEnd());
  for (ncclComm_t comm : comms) OK(pyncclCpuStreamSynchronize(comm, nullptr, -1));
  CHECK_EQ(std::count(x.begin(), x.end(), 200.0f), 200);
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

TEST_CASE("too many ranks are refused at once") {
  std::vector<ncclComm_t> comms(5000, nullptr);
  double began = now();
  CHECK_EQ(int(ncclCommInitAll(comms.data(), 5000, nullptr)), int(ncclSystemError));
  CHECK(contains(ncclGetLastError(nullptr), "ndev is 5000"));
  CHECK(contains(ncclGetLastError(nullptr), std::to_string(kMostLocalRanks)));
  Gauge gauge;
  ncclUniqueId id = settled_id();
  CHECK_EQ(int(ncclCommInitRank(&comms[0], 8000000, id, 0)), int(ncclSystemError));
  CHECK(contains(ncclGetLastError(nullptr), "8000000 ranks"));
  CHECK(!gauge.grew_beyond(16 * 1024));
  CHECK(now() - began < 30);
}

}  // namespace
