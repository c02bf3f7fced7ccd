// Who is in a communicator and how they are reached, where ranks are threads of several processes: links
// within a process, over Unix sockets and over TCP in one communicator.
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/nccl.hpp"
#include "helpers.hpp"

using namespace testing;

static std::atomic<bool> accepts_slowly{false};

// The library's own: a byte says that a data connection is accepted.
extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  if (bytes == 1 && accepts_slowly) usleep(3000);
  return sendto(fd, data, bytes, flags, nullptr, 0);
}

namespace {

constexpr int kProcesses = 3, kThreads = 3, kRanks = kProcesses * kThreads;

#define OK(call) CHECK_EQ(int(call), int(ncclSuccess))

ncclResult_t wait(ncclComm_t comm) { return pyncclCpuStreamSynchronize(comm, nullptr, -1); }

void sums(ncclComm_t comm, int nranks) {
  for (size_t count : {size_t(1), size_t(3000), size_t(200000)}) {
    std::vector<float> x(count, 1);
    OK(ncclAllReduce(x.data(), x.data(), count, ncclFloat32, ncclSum, comm, nullptr));
    OK(wait(comm));
    CHECK_EQ(size_t(std::count(x.begin(), x.end(), float(nranks))), count);
  }
}

void sends(ncclComm_t comm, int rank, int nranks) {
  for (size_t count : {size_t(10), size_t(100000)}) {
    std::vector<float> out(count, float(rank)), in(count, -1);
    OK(ncclGroupStart());
    OK(ncclSend(out.data(), count, ncclFloat32, (rank + 1) % nranks, comm, nullptr));
    OK(ncclRecv(in.data(), count, ncclFloat32, (rank + nranks - 1) % nranks, comm, nullptr));
    OK(ncclGroupEnd());
    OK(wait(comm));
    CHECK_EQ(in.back(), float((rank + nranks - 1) % nranks));
  }
}

// Calls body(rank, comm) for every rank; the ranks of a process follow each other or take turns. All
// processes are forked before one of them uses the library: AddressSanitizer's allocator does not survive a
// fork while another thread allocates.
template <class Body>
void spread(bool take_turns, Body body, int victim = -1) {
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  std::vector<pid_t> pids;
  for (int p = 0; p <= kProcesses; ++p) {
    fflush(nullptr);
    pid_t pid = fork();
    if (pid == 0) {
      alarm(60);
      failures = 0;
      ncclUniqueId id;
      if (p == kProcesses) {  // makes the id, and serves it until it is killed
        OK(ncclGetUniqueId(&id));
        for (int q = 0; q < kProcesses; ++q) CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
        for (;;) pause();
      }
      CHECK_EQ(read(ids[0], &id, sizeof id), ssize_t(sizeof id));
      if (const char* host = getenv("HOST_OF_EACH")) set("NCCL_HOSTID", (host + std::to_string(p)).c_str());
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, rank = take_turns ? t * kProcesses + p : p * kThreads + t] {
          ncclComm_t comm = nullptr;
          ncclResult_t r = ncclCommInitRank(&comm, kRanks, id, rank);
          if (r != ncclSuccess) fprintf(stderr, "rank %d: %s\n", rank, ncclGetLastError(nullptr));
          OK(r);
          if (comm) body(rank, comm);
        });
      for (std::thread& t : threads) t.join();
      fflush(nullptr);
      _exit(failures == 0 ? 0 : 1);
    }
    pids.push_back(pid);
  }
  for (int p = 0; p <= kProcesses; ++p) {
    if (p == kProcesses) kill(pids.back(), SIGKILL);
    int status = 0;
    while (waitpid(pids[size_t(p)], &status, 0) < 0 && errno == EINTR) continue;
    CHECK_EQ(status, p == victim || p == kProcesses ? SIGKILL : 0);
  }
  close(ids[0]);
  close(ids[1]);
}

void everything(int rank, ncclComm_t comm) {
  sums(comm, kRanks);
  sends(comm, rank, kRanks);
  ncclComm_t part = nullptr;
  OK(ncclCommSplit(comm, rank % 2, kRanks - rank, &part, nullptr));
  int nranks = 0;
  OK(ncclCommCount(part, &nranks));
  CHECK_EQ(nranks, kRanks / 2 + (rank % 2 == 0));
  sums(part, nranks);
  OK(ncclCommFinalize(part));
  OK(ncclCommDestroy(part));
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
}

TEST_CASE("threads of several processes") {
  for (bool take_turns : {false, true}) spread(take_turns, everything);
}
TEST_CASE("through shared memory") {
  set("PYNCCL_CPU_DIRECT", "0");
  for (bool take_turns : {false, true}) spread(take_turns, everything);
}
TEST_CASE("over tcp") {
  set("HOST_OF_EACH", "host");
  for (bool take_turns : {false, true}) spread(take_turns, everything);
}
// Nothing is sent over a connection before it is accepted.
TEST_CASE("over tcp that accepts slowly") {
  set("HOST_OF_EACH", "host");
  accepts_slowly = true;
  for (bool take_turns : {false, true}) spread(take_turns, everything);
  accepts_slowly = false;
}
TEST_CASE("with a secret") {
  set("PYNCCL_SECRET", "between the two of us");
  spread(true, everything);
  set("HOST_OF_EACH", "host");
  spread(true, everything);
}

// The threads of the others hear of the death of one process, each by the name of one of its ranks.
TEST_CASE("a killed process is named") {
  spread(
      true,
      [](int rank, ncclComm_t comm) {
        std::vector<float> x(300000, 1);
        ncclResult_t result = ncclSuccess;
        for (int i = 0; result == ncclSuccess; ++i) {
          if (rank == 4 && i == 10) kill(getpid(), SIGKILL);
          result = ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclMax, comm, nullptr);
          if (result == ncclSuccess) result = wait(comm);
        }
        CHECK_EQ(int(result), int(ncclRemoteError));
        std::string text = ncclGetLastError(comm);
        CHECK((contains(text, "rank 1 (pid") || contains(text, "rank 4 (pid") ||
               contains(text, "rank 7 (pid")));
        OK(ncclCommAbort(comm));
      },
      1);
}

// Between threads an error, an abort and a lost connection are heard of without a socket.
TEST_CASE("threads hear of each other") {
  for (const char* fault : {"", "rank=1,call=3,action=drop", "rank=1,call=3,action=fail:ncclInternalError"}) {
    set("PYNCCL_CPU_FAULT", fault);
    CHECK_EQ(in_child([&] {
               ncclUniqueId id;
               OK(ncclGetUniqueId(&id));
               std::vector<std::thread> ranks;
               for (int r = 0; r < 4; ++r)
                 ranks.emplace_back([&, r] {
                   ncclComm_t comm = nullptr;
                   OK(ncclCommInitRank(&comm, 4, id, r));
                   float x = 1;
                   ncclResult_t result = ncclSuccess;
                   for (int i = 0; i < 100 && result == ncclSuccess; ++i) {
                     if (r == 1 && i == 2 && !*fault) break;  // aborts
                     result = ncclAllReduce(&x, &x, 1, ncclFloat32, ncclMax, comm, nullptr);
                     if (result == ncclSuccess) result = wait(comm);
                   }
                   if (r != 1) {
                     CHECK_EQ(int(result), int(ncclRemoteError));
                     std::string text = ncclGetLastError(comm);
                     CHECK_MESSAGE(contains(text, "rank 1"), std::string(fault), ": ", text);
                   }
                   OK(ncclCommAbort(comm));
                 });
               for (std::thread& t : ranks) t.join();
             }),
             0);
  }
}

}  // namespace
