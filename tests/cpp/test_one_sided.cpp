// Windows, Put, Signal and WaitSignal as a C program uses them, on every way that data takes: threads, mapped
// memory, the kernel's direct access, frames within a host, and TCP.
#include <sys/resource.h>

#include "worlds.hpp"

using namespace testing;

namespace {

constexpr int kFloats = 300000;  // several slices and frames

// Every rank puts to its right neighbour and waits for its left one.
void ring(World& w) {
  Memory window(w.way.mapped, 2 * kFloats * sizeof(float));
  ncclWindow_t win = nullptr;
  OK(ncclCommWindowRegister(w.comm, window.floats(), 2 * kFloats * sizeof(float), &win,
                            NCCL_WIN_COLL_SYMMETRIC));
  std::vector<float> source(kFloats);
  for (int round = 0; round < 5; ++round) {
    for (float& v : source) v = float(100 * round + w.rank);
    size_t count = round == 4 ? 1 : kFloats, offset = round % 2 ? kFloats * sizeof(float) : 0;
    OK(ncclPutSignal(source.data(), count, ncclFloat32, w.right(), win, offset, 0, 0, 0, w.comm, nullptr));
    OK(await(w, w.left()));
    OK(synchronize(w.comm));
    CHECK_EQ(wrong(window.floats() + offset / sizeof(float), count, float(100 * round + w.left())),
             size_t(0));
    // The neighbour has read it before the next round overwrites it.
    OK(ncclSignal(w.left(), 1, 0, 0, w.comm, nullptr));
    OK(await(w, w.right(), 1, 1));
    OK(synchronize(w.comm));
  }
  OK(ncclCommWindowDeregister(w.comm, win));
}

TEST_CASE("a ring of puts") { on_every_way(3, ring); }
TEST_CASE("a put to the rank itself") { with_world(kWays[0], 1, ring); }

// Signals of one index are counted in any number of waits; those of others and of peers are apart.
TEST_CASE("signals are counted") {
  on_every_way(3, [](World& w) {
    if (w.rank != 0) {
      for (int i = 0; i < 10; ++i) OK(ncclSignal(0, i % 2, 0, 0, w.comm, nullptr));
      return OK(synchronize(w.comm)), void();
    }
    OK(await(w, 1, 2, 1));
    OK(await(w, 1, 3, 1));
    ncclWaitSignalDesc_t both[] = {{5, 1, 0, 0}, {5, 2, 0, 0}, {1, 2, 1, 0}, {4, 2, 1, 0}};
    OK(ncclWaitSignal(4, both, w.comm, nullptr));
    OK(synchronize(w.comm));
  });
}

// Two ranks that put before either waits: no put needs the peer's call, however much it is.
TEST_CASE("a put needs no call of the peer") {
  on_every_way(2, [](World& w) {
    constexpr size_t kBytes = size_t(24) << 20;
    Memory window(w.way.mapped, kBytes);
    ncclWindow_t win = nullptr;
    OK(ncclCommWindowRegister(w.comm, window.floats(), kBytes, &win, 0));
    if (w.rank == 0) {
      std::vector<char> source(kBytes, 7);
      OK(ncclPutSignal(source.data(), kBytes, ncclInt8, 1, win, 0, 0, 0, 0, w.comm, nullptr));
      OK(synchronize(w.comm));
    } else {
      usleep(200000);
      OK(await(w, 0));
      OK(synchronize(w.comm));
      std::vector<char> want(kBytes, 7);
      CHECK_EQ(memcmp(window.floats(), want.data(), kBytes), 0);
    }
    OK(ncclCommWindowDeregister(w.comm, win));
  });
}

TEST_CASE("a group of puts and waits beside collectives and messages") {
  on_every_way(3, [](World& w) {
    Memory window(w.way.mapped, 3 * 4096);
    ncclWindow_t win = nullptr;
    OK(ncclCommWindowRegister(w.comm, window.floats(), 3 * 4096, &win, 0));
    std::vector<float> mine(1024, float(w.rank + 1)), sum(1024), got(1024);
    for (int round = 0; round < 3; ++round) {
      OK(ncclGroupStart());
      OK(await(w, w.left()));
      OK(ncclAllReduce(mine.data(), sum.data(), 1024, ncclFloat32, ncclSum, w.comm, nullptr));
      for (int q = 0; q < 3; ++q)
        if (q != w.left())
          OK(ncclPutSignal(mine.data(), 1024, ncclFloat32, q, win, size_t(w.rank) * 4096, 0, 0, 0, w.comm,
                           nullptr));
      OK(ncclSend(mine.data(), 1024, ncclFloat32, w.right(), w.comm, nullptr));
      OK(ncclRecv(got.data(), 1024, ncclFloat32, w.left(), w.comm, nullptr));
      OK(await(w, w.rank));
      OK(ncclGroupEnd());
      OK(synchronize(w.comm));
      CHECK_EQ(wrong(sum.data(), 1024, 6), size_t(0));
      CHECK_EQ(wrong(got.data(), 1024, float(w.left() + 1)), size_t(0));
      for (int q : {w.rank, w.left()})
        CHECK_EQ(wrong(window.floats() + q * 1024, 1024, float(q + 1)), size_t(0));
      // Nobody puts again before all have read.
      OK(ncclAllReduce(mine.data(), sum.data(), 1024, ncclFloat32, ncclSum, w.comm, nullptr));
      OK(synchronize(w.comm));
    }
    OK(ncclCommWindowDeregister(w.comm, win));
  });
}

TEST_CASE("a peer's memory is reached by load and store where it is mapped") {
  on_every_way(2, [](World& w) {
    Memory window(w.way.mapped, 8192);
    ncclWindow_t win = nullptr;
    OK(ncclCommWindowRegister(w.comm, window.floats(), 8192, &win, 0));
    void *mine = nullptr, *theirs = nullptr, *lsa = nullptr;
    OK(ncclGetPeerDevicePointer(win, 4096, w.rank, &mine));
    CHECK_EQ(mine, static_cast<void*>(window.floats() + 1024));
    OK(ncclGetPeerDevicePointer(win, 4096, 1 - w.rank, &theirs));
    CHECK_EQ(theirs != nullptr, !w.way.processes || w.way.mapped);
    if (ncclTeamLsa(w.comm).nRanks == 2) {
      OK(ncclGetLsaDevicePointer(win, 4096, 1 - w.rank, &lsa));
      CHECK_EQ(lsa, theirs);
    }
    if (theirs) {
      *static_cast<float*>(theirs) = float(w.rank + 1);
      OK(ncclSignal(1 - w.rank, 0, 0, 0, w.comm, nullptr));
      OK(await(w, 1 - w.rank));
      OK(synchronize(w.comm));
      CHECK_EQ(window.floats()[1024], float(2 - w.rank));
    }
    RESULT(ncclGetPeerDevicePointer(win, 8192, 0, &lsa), ncclInvalidArgument);
    SAYS(last_error(), "8192 bytes");
    RESULT(ncclGetPeerDevicePointer(win, 0, 2, &lsa), ncclInvalidArgument);
    OK(ncclCommWindowDeregister(w.comm, win));
    RESULT(ncclGetPeerDevicePointer(win, 0, 0, &lsa), ncclInvalidArgument);
  });
}

TEST_CASE("wrong arguments") {
  with_world(kWays[0], 2, [](World& w) {
    Memory window(true, 4096);
    ncclWindow_t win = nullptr;
    ncclComm_t child = nullptr;
    OK(ncclCommSplit(w.comm, 0, 0, &child, nullptr));
    OK(ncclCommWindowRegister(w.comm, window.floats(), 4096, &win, 0));
    float x[4] = {};
    auto put = [&](size_t count, int type, int peer, size_t offset, int signal, int context, unsigned flags) {
      return ncclPutSignal(x, count, ncclDataType_t(type), peer, win, offset, signal, context, flags, w.comm,
                           nullptr);
    };
    RESULT(put(2, ncclFloat32, 0, 4092, 0, 0, 0), ncclInvalidArgument);
    SAYS(last_error(), "the window of rank 0 has 4096 bytes");
    RESULT(put(SIZE_MAX / 4, ncclFloat32, 0, 0, 0, 0, 0), ncclInvalidArgument);
    RESULT(put(1, ncclFloat32, 0, SIZE_MAX, 0, 0, 0), ncclInvalidArgument);
    RESULT(put(1, 99, 0, 0, 0, 0, 0), ncclInvalidArgument);
    RESULT(put(1, ncclFloat32, 2, 0, 0, 0, 0), ncclInvalidArgument);
    SAYS(last_error(), "peer is 2, expected 0 to 1");
    RESULT(put(1, ncclFloat32, 0, 0, 16, 0, 0), ncclInvalidArgument);
    SAYS(last_error(), "sigIdx is 16, expected 0 to 15");
    RESULT(put(1, ncclFloat32, 0, 0, 0, 1, 0), ncclInvalidArgument);
    SAYS(last_error(), "ctx is 1, expected 0 to 0");
    RESULT(put(1, ncclFloat32, 0, 0, 0, 0, 1), ncclInvalidArgument);
    RESULT(ncclPutSignal(nullptr, 1, ncclInt8, 0, win, 0, 0, 0, 0, w.comm, nullptr), ncclInvalidArgument);
    RESULT(ncclPutSignal(x, 1, ncclInt8, 0, win, 0, 0, 0, 0, child, nullptr), ncclInvalidArgument);
    SAYS(last_error(), "another communicator");
    RESULT(ncclWaitSignal(0, nullptr, w.comm, nullptr), ncclInvalidArgument);
    RESULT(await(w, 0, 0), ncclInvalidArgument);
    SAYS(last_error(), "opCnt of descriptor 0 is 0");
    RESULT(await(w, -1), ncclInvalidArgument);
    OK(ncclCommWindowDeregister(w.comm, win));
    RESULT(put(1, ncclFloat32, 0, 0, 0, 0, 0), ncclInvalidArgument);
    OK(ncclCommDestroy(child));
  });
}

TEST_CASE("symmetric windows of different sizes") {
  on_every_way(2, [](World& w) {
    Memory window(w.way.mapped, 8192);
    ncclWindow_t win = nullptr;
    size_t size = w.rank ? 8192 : 4096;
    RESULT(ncclCommWindowRegister(w.comm, window.floats(), size, &win, NCCL_WIN_COLL_SYMMETRIC),
           ncclInvalidUsage);
    SAYS(last_error(),
         "rank 0 registers a symmetric window of 4096 bytes, rank 1 a symmetric window of 8192");
    CHECK(win == nullptr);
    OK(ncclCommWindowRegister(w.comm, window.floats(), size, &win, 0));  // the communicator is as before
    OK(ncclCommWindowDeregister(w.comm, win));
  });
}

ncclConfig_t config_of(int contexts, int signals) {
  ncclConfig_t c;
  memset(static_cast<void*>(&c), 0, sizeof c);
  c.size = offsetof(ncclConfig_t, numRmaSig) + sizeof c.numRmaSig;
  c.magic = NCCL_API_MAGIC;
  c.version = 23102;
  for (int* field : {&c.blocking, &c.cgaClusterSize, &c.minCTAs, &c.maxCTAs, &c.splitShare, &c.trafficClass,
                     &c.collnetEnable, &c.CTAPolicy, &c.shrinkShare, &c.nvlsCTAs, &c.nChannelsPerNetPeer,
                     &c.nvlinkCentricSched, &c.graphUsageMode, &c.maxP2pPeers, &c.graphStreamOrdering})
    *field = NCCL_CONFIG_UNDEF_INT;
  c.numRmaCtx = contexts;
  c.numRmaSig = signals;
  return c;
}

TEST_CASE("config decides how many contexts and signals there are") {
  const ncclUniqueId id = new_id(), other = new_id();
  as_threads(2, [&](int r) {
    ncclConfig_t config = config_of(4, 3);
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRankConfig(&comm, 2, id, r, &config));
    OK(ncclSignal(1 - r, 2, 3, 0, comm, nullptr));
    ncclWaitSignalDesc_t d{1, 1 - r, 2, 3};
    OK(ncclWaitSignal(1, &d, comm, nullptr));
    OK(synchronize(comm));
    RESULT(ncclSignal(1 - r, 3, 0, 0, comm, nullptr), ncclInvalidArgument);
    RESULT(ncclSignal(1 - r, 0, 4, 0, comm, nullptr), ncclInvalidArgument);
    OK(ncclCommDestroy(comm));
    config.numRmaSig = r ? 3 : 2;
    RESULT(ncclCommInitRankConfig(&comm, 2, other, r, &config), ncclInvalidUsage);
    SAYS(last_error(), "numRmaSig");
  });
  // The library has 64 signals in all; NCCL accepts any number.
  ncclConfig_t config = config_of(5, 13);
  ncclComm_t comm = nullptr;
  OK(ncclCommInitRankConfig(&comm, 1, new_id(), 0, &config));
  RESULT(ncclSignal(0, 12, 0, 0, comm, nullptr), ncclInvalidArgument);
  SAYS(last_error(), "sigIdx is 12, expected 0 to 11");
  OK(ncclCommDestroy(comm));
}

// The peer may not have returned from the creation yet.
TEST_CASE("a signal at once") {
  on_every_way(3, [](World& w) {
    for (int i = 0; i < 20; ++i) {
      ncclComm_t child = nullptr;
      OK(ncclCommSplit(w.comm, 0, 0, &child, nullptr));
      OK(ncclSignal(w.right(), 0, 0, 0, child, nullptr));
      ncclWaitSignalDesc_t d{1, w.left(), 0, 0};
      OK(ncclWaitSignal(1, &d, child, nullptr));
      OK(synchronize(child));
      OK(ncclCommDestroy(child));
    }
  });
}

TEST_CASE("signals that nobody waits for") {
  on_every_way(2, [](World& w) {
    ncclComm_t child = nullptr;
    OK(ncclCommSplit(w.comm, 0, 0, &child, nullptr));
    if (w.rank == 0) OK(ncclSignal(1, 0, 0, 0, child, nullptr));
    ncclResult_t r = ncclCommFinalize(child);
    if (w.way.processes) {
      CHECK_EQ(r, ncclInvalidUsage);
      SAYS(last_error(child), "rank 0 sent 1 signal to rank 1, which waited for 0 before ncclCommFinalize");
    }
    OK(ncclCommAbort(child));
  });
}

TEST_CASE("a signal that never comes") {
  set("PYNCCL_CPU_TIMEOUT", "0.3");
  on_every_way(2, [](World& w) {
    if (w.rank == 1) {
      OK(ncclSignal(0, 2, 0, 0, w.comm, nullptr));
      OK(synchronize(w.comm));
      CHECK(soon(20, [&] {
        ncclResult_t state = ncclSuccess;
        ncclCommGetAsyncError(w.comm, &state);
        return state != ncclSuccess;
      }));
    } else {
      OK(await(w, 1, 3, 2));
      RESULT(synchronize(w.comm), ncclTimeout);
    }
    SAYS(last_error(w.comm), "WaitSignal for 3 of signal 2 from rank 1, of which 1 arrived");
    OK(ncclCommAbort(w.comm));
    const ncclUniqueId id = new_id();
    OK(ncclCommInitRank(&w.comm, 1, id, 0));  // for the end
  });
}

TEST_CASE("who waits for a signal of a rank that dies") {
  for (const Way& way : kWays) {
    if (!way.processes) continue;
    with_a_victim(way, [](World& w) {
      Memory window(w.way.mapped, 4096);
      ncclWindow_t win = nullptr;
      OK(ncclCommWindowRegister(w.comm, window.floats(), 4096, &win, 0));
      if (w.rank == 1) kill(getpid(), SIGKILL);
      ncclResult_t r = await(w, 1);  // the death may be known already
      CHECK_EQ(r == ncclSuccess ? synchronize(w.comm) : r, ncclRemoteError);
    });
  }
}

// Whoever ends a communicator may free or use its window afterwards, whatever its peers still put.
TEST_CASE("no put arrives after the end") {
  constexpr size_t kBytes = size_t(32) << 20;
  for (const char* how : {"abort", "destroy", "revoke"})
    on_every_way(2, [&](World& w) {
      ncclComm_t child = nullptr;
      OK(ncclCommSplit(w.comm, 0, 0, &child, nullptr));
      auto window = std::make_unique<Memory>(w.way.mapped, kBytes);
      ncclWindow_t win = nullptr;
      OK(ncclCommWindowRegister(child, window->floats(), kBytes, &win, 0));
      if (w.rank == 0) {
        std::vector<char> source(kBytes, 7);
        for (int i = 0; i < 3; ++i) {
          ncclResult_t r = ncclPutSignal(source.data(), kBytes, ncclInt8, 1, win, 0, 0, 0, 0, child, nullptr);
          if (r == ncclSuccess) synchronize(child);
        }
        OK(ncclCommAbort(child));
      } else {
        usleep(3000);
        if (*how == 'a') OK(ncclCommAbort(child));
        if (*how == 'd') OK(ncclCommDestroy(child));
        if (*how == 'r') OK(ncclCommRevoke(child, NCCL_REVOKE_DEFAULT));
        memset(window->floats(), 1, kBytes);
        usleep(100000);
        std::vector<char> want(kBytes, 1);
        CHECK_EQ(memcmp(window->floats(), want.data(), kBytes), 0);
        if (*how == 'r') OK(ncclCommAbort(child));
      }
      // Nobody frees what the other may still read.
      float x = 1;
      OK(sum(&x, 1, w.comm));
      OK(synchronize(w.comm));
    });
}

TEST_CASE("memory that is freed while its window is open") {
  for (const Way& way : kWays)
    if (way.mapped || way.hosts)
      with_world(way, 2, [](World& w) {
        void* memory = nullptr;
        ncclWindow_t win = nullptr;
        OK(ncclMemAlloc(&memory, 8192));
        OK(ncclCommWindowRegister(w.comm, memory, 8192, &win, 0));
        OK(ncclMemFree(memory));
        float x = 1;
        OK(ncclPutSignal(&x, 1, ncclFloat32, w.right(), win, 4096, 0, 0, 0, w.comm, nullptr));
        OK(await(w, w.left()));
        OK(synchronize(w.comm));
        OK(ncclCommWindowDeregister(w.comm, win));
      });
}

TEST_CASE("memory beyond what the machine has and beyond its descriptors") {
  void* memory = nullptr;
  RESULT(ncclMemAlloc(&memory, size_t(1) << 46), ncclSystemError);
  rlimit few{100, 100};
  setrlimit(RLIMIT_NOFILE, &few);
  std::vector<void*> all(200);
  for (void*& at : all) OK(ncclMemAlloc(&at, 64));
  OK(ncclCommDestroy(alone()));
  for (void* at : all) OK(ncclMemFree(at));
}

TEST_CASE("windows leave nothing behind") {
  with_world(kWays[2], 2, [](World& w) {
    auto once = [&] {
      Memory window(true, 1 << 20);
      ncclWindow_t win = nullptr;
      OK(ncclCommWindowRegister(w.comm, window.floats(), 1 << 20, &win, 0));
      OK(ncclCommWindowDeregister(w.comm, win));
    };
    once();
    Has before = process_has();
    for (int i = 0; i < 50; ++i) once();
    CHECK(settles_to(before));
    CHECK(process_has().kib < before.kib + 20000);
  });
}

}  // namespace
