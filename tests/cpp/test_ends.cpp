// Ranks that end: one after another in one thread, without destroying anything, or with something on its way.
#include "ranks.hpp"

using namespace testing;

#if defined(__SANITIZE_ADDRESS__)
// A forked child that exits has let go of its parent's objects, which are no leak of its own.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

namespace {

TEST_CASE("finalized one after another in one thread") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "10");
  std::vector<ncclComm_t> comms = together(3);
  Stopwatch watch;
  for (ncclComm_t comm : comms) OK(ncclCommFinalize(comm));
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  CHECK(watch.seconds() < 8);
}

// The last one compares what all have issued.
TEST_CASE("finalized in one thread with calls that differ") {
  std::vector<ncclComm_t> comms = together(2);
  float x = 1;
  OK(ncclCommFinalize(comms[0]));
  OK(sum(&x, 1, comms[1]));
  RESULT(ncclCommFinalize(comms[1]), ncclInvalidUsage);
  for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
}

// One of the two compares, whichever comes later.
TEST_CASE("finalized by two threads at the same time with calls that differ") {
  for (int round = 0; round < 50; ++round) {
    std::vector<ncclComm_t> comms = together(2);
    float x = 1;
    OK(ncclSend(&x, 1, ncclFloat32, 1, comms[0], nullptr));
    ncclResult_t results[2];
    std::thread other([&] { results[1] = ncclCommFinalize(comms[1]); });
    results[0] = ncclCommFinalize(comms[0]);
    other.join();
    CHECK((results[0] == ncclInvalidUsage || results[1] == ncclInvalidUsage));
    for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
  }
}

TEST_CASE("finalized and destroyed in one group") {
  for (int round = 0; round < 20; ++round) {
    std::vector<ncclComm_t> comms = together(3);
    OK(ncclGroupStart());
    for (ncclComm_t comm : comms) {
      OK(ncclCommFinalize(comm));
      OK(ncclCommDestroy(comm));
    }
    RESULT(ncclGroupEnd(), ncclInvalidUsage);
    SAYS(last_error(), "was destroyed or aborted before the group ended");
  }
}

TEST_CASE("a rank that does not finalize is named") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "1");
  ncclUniqueId id = new_id();
  Meeting done(2);
  as_processes(2, [&](int rank) {
    set("PYNCCL_CPU_INIT_TIMEOUT", "20");
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRank(&comm, 2, id, rank));
    set("PYNCCL_CPU_INIT_TIMEOUT", "1");
    if (rank == 0) {
      RESULT(ncclCommFinalize(comm), ncclTimeout);
      SAYS(last_error(), "timed out waiting for rank 1 to finalize");
    }
    done();
    OK(ncclCommDestroy(comm));
  });
}

// Rank 1 sends and ends at once, in the way that `end` says; rank 0 receives it all.
void received_from_a_rank_that_ends(bool own_hosts, size_t count, bool receives_late, void (*end)(ncclComm_t),
                                    ncclResult_t then, const char* text) {
  ncclUniqueId id = new_id();
  Meeting posted(2);
  as_processes(2, [&](int rank) {
    if (own_hosts) set("NCCL_HOSTID", rank ? "1" : "0");
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRank(&comm, 2, id, rank));
    constexpr int kMessages = 5;
    std::vector<std::vector<float>> x(kMessages, std::vector<float>(count));
    if (rank == 1) {
      if (!receives_late) posted();
      for (int i = 0; i < kMessages; ++i) {
        x[size_t(i)].assign(count, float(i + 1));
        OK(ncclSend(x[size_t(i)].data(), count, ncclFloat32, 0, comm, nullptr));
      }
      if (!receives_late) OK(synchronize(comm, nullptr, 20000));
      end(comm);
      fflush(nullptr);
      _exit(failures ? 1 : 0);
    }
    if (receives_late) usleep(300000);
    for (int i = 0; i < kMessages; ++i)
      OK(ncclRecv(x[size_t(i)].data(), count, ncclFloat32, 1, comm, nullptr));
    if (!receives_late) posted();
    OK(synchronize(comm, nullptr, 20000));
    for (int i = 0; i < kMessages; ++i) CHECK_EQ(x[size_t(i)].back(), float(i + 1));
    ncclResult_t r = sum(x[0].data(), 1, comm);
    RESULT(r == ncclSuccess ? synchronize(comm, nullptr, 20000) : r, then);
    SAYS(last_error(), text);
    OK(ncclCommAbort(comm));
  });
}

constexpr size_t kSmall = 100, kLarge = 300000;

void dies(ncclComm_t) { _exit(failures ? 1 : 0); }
void exits(ncclComm_t) { exit(failures ? 1 : 0); }
void destroys(ncclComm_t comm) { OK(ncclCommDestroy(comm)); }
// Its process goes on; a second call tells nothing more.
void leaves(ncclComm_t comm) {
  for (int i = 0; i < 2; ++i) OK(pyncclCpuLeave(comm));
  OK(synchronize(comm, nullptr, 20000));
  sleep(2);
}

TEST_CASE("what a rank sent before it died") {
  for (int round = 0; round < scaled(20, 5, 3); ++round)
    for (bool own_hosts : {false, true})
      for (size_t count : {kSmall, kLarge}) {
        at_step("round %d, own hosts %d, count %zu", round, own_hosts, count);
        received_from_a_rank_that_ends(own_hosts, count, false, dies, ncclRemoteError, "rank 1");
      }
}

TEST_CASE("what a rank sent before it exited") {
  for (auto end : {exits, destroys, leaves})
    for (bool late : {false, true})
      for (bool own_hosts : {false, true})
        for (size_t count : {kSmall, kLarge}) {
          if (late && end != exits) continue;
          at_step("late %d, own hosts %d, count %zu", late, own_hosts, count);
          received_from_a_rank_that_ends(own_hosts, count, late, end, ncclInvalidUsage,
                                         "has finalized, destroyed or dropped its communicator");
        }
}

// Programs that exit without destroying, after the same collectives.
TEST_CASE("programs that exit") {
  for (int round = 0; round < scaled(40, 10, 5) && failures == 0; ++round) {
    ncclUniqueId id = new_id();
    as_processes(3, [&](int rank) {
      ncclComm_t comm = nullptr;
      OK(ncclCommInitRank(&comm, 3, id, rank));
      std::vector<float> x(50000, 1);
      for (size_t count : {size_t(1), size_t(500), x.size()}) {
        OK(sum(x.data(), count, comm));
        OK(ncclBroadcast(x.data(), x.data(), count, ncclFloat32, 0, comm, nullptr));
      }
      if (rank != 2) OK(synchronize(comm, nullptr, 20000));
      exit(failures ? 1 : 0);
    });
  }
}

// What was issued and nobody answers does not hold the exit for long, and is told as a death.
TEST_CASE("an exit with calls that nobody answers") {
  ncclUniqueId id = new_id();
  Meeting issued(2);
  as_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRank(&comm, 2, id, rank));
    float x = 1;
    if (rank == 1) {
      OK(sum(&x, 1, comm));
      issued();
      exit(failures ? 1 : 0);
    }
    issued();
    ncclResult_t state = ncclSuccess;
    CHECK(soon(20, [&] { return OK(ncclCommGetAsyncError(comm, &state)) && state != ncclSuccess; }));
    CHECK_EQ(int(state), int(ncclRemoteError));
    OK(ncclCommAbort(comm));
  });
}

}  // namespace
