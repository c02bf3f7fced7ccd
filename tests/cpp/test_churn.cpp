// What communicators, streams and unique ids leave behind once they are gone: nothing, however many there
// were.
#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <random>

#include "ranks.hpp"

using namespace testing;

namespace {

// ---- memory, threads and descriptors ----

// The bytes that malloc has given out, exactly; a sanitizer's own allocator does not tell.
struct Held {
  Has has = process_has();
  long heap_kib = kSanitized ? 0 : long(mallinfo2().uordblks / 1024);
};

constexpr long kMostHeapKib = 150;
constexpr long kMostKib = 600;  // pages of code that are touched for the first time count, too

// The library may end what is left of a communicator a moment after the call that ended it.
Held settled() {
  Held last;
  soon(3, [&] {
    Held now;
    bool still = now.has.files >= last.has.files && now.has.threads >= last.has.threads;
    last = now;
    if (!still) return false;
    usleep(60000);
    return true;
  });
  return last;
}

void check_growth(const Held& early, const Held& late, long cycles) {
  INFO(formatted(
      "in %ld cycles: memory %ld to %ld KiB (heap %ld to %ld), threads %ld to %ld, files %ld to %ld", cycles,
      early.has.kib, late.has.kib, early.heap_kib, late.heap_kib, early.has.threads, late.has.threads,
      early.has.files, late.has.files));
  CHECK(settles_to(early.has));
  if (kSanitized) return;
  CHECK(late.has.kib <= early.has.kib + kMostKib);
  CHECK(late.heap_kib <= early.heap_kib + kMostHeapKib);
}

// What the first fifth of the cycles needs, the rest must not add to.
void churn(int cycles, const std::function<void(int)>& cycle) {
  mallopt(M_ARENA_MAX, 1);  // else each thread may begin an arena of its own
  Held early;
  for (int i = 0; i < cycles && failures == 0; ++i) {
    at_step("cycle %d", i);
    if (i == cycles / 5) early = settled();
    cycle(i);
  }
  check_growth(early, settled(), cycles - cycles / 5);
}

void use(ncclComm_t comm, float want, cudaStream_t stream = nullptr) {
  float x[50];
  std::fill_n(x, 50, 1.0f);
  OK(sum(x, 50, comm, stream));
  OK(synchronize(comm, stream, 20000));
  CHECK_EQ(x[49], want);
}

// Both ranks in this thread.
void use(const std::vector<ncclComm_t>& comms) {
  std::vector<float> x(comms.size(), 1);
  for (size_t r = 0; r < comms.size(); ++r) OK(sum(&x[r], 1, comms[r]));
  for (ncclComm_t comm : comms) OK(synchronize(comm, nullptr, 20000));
  CHECK_EQ(x[0], float(comms.size()));
}

TEST_CASE("one rank") {
  churn(scaled(5000, 500, 250), [](int) {
    ncclComm_t comm = alone();
    use(comm, 1);
    OK(ncclCommDestroy(comm));
  });
}

TEST_CASE("two ranks of one thread") {
  churn(scaled(2000, 250, 100), [](int) {
    std::vector<ncclComm_t> comms = together(2);
    use(comms);
    for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
  });
}

// Threads that come and go, each with a default stream.
TEST_CASE("two threads") {
  churn(scaled(2000, 250, 100), [](int) {
    ncclUniqueId id = new_id();
    as_threads(2, [&](int rank) {
      ncclComm_t comm = nullptr;
      OK(ncclCommInitRank(&comm, 2, id, rank));
      use(comm, 2);
      OK(ncclCommFinalize(comm));
      OK(ncclCommDestroy(comm));
    });
  });
}

// Aborted with calls underway that will never be matched.
TEST_CASE("aborted") {
  churn(scaled(2000, 250, 100), [](int i) {
    std::vector<ncclComm_t> comms = together(2);
    float x = 1;
    if (i % 2) OK(sum(&x, 1, comms[0]));
    for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
  });
}

TEST_CASE("split and shrunk") {
  std::vector<ncclComm_t> parents = together(3);
  churn(scaled(700, 100, 50), [&](int i) {
    as_threads(3, [&](int rank) {
      int excluded = 2;
      ncclComm_t parent = parents[size_t(rank)], child = nullptr;
      if (i % 2)
        OK(ncclCommSplit(parent, rank == 2 ? NCCL_SPLIT_NOCOLOR : 0, -rank, &child, nullptr));
      else if (rank < 2)
        OK(ncclCommShrink(parent, &excluded, 1, &child, nullptr, NCCL_SHRINK_DEFAULT));
      if (child) use(child, 2);
      OK(ncclCommDestroy(child));
    });
  });
  for (ncclComm_t comm : parents) OK(ncclCommAbort(comm));
}

TEST_CASE("creations that fail") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "0.01");
  churn(scaled(500, 100, 50), [](int i) {
    ncclComm_t comm = nullptr;
    ncclResult_t want = i % 2 ? ncclInvalidArgument : ncclTimeout;
    RESULT(ncclCommInitRank(&comm, 2, new_id(), i % 2 ? 5 : 0), want);
    CHECK(comm == nullptr);
  });
}

TEST_CASE("streams with work") {
  ncclComm_t comm = alone();
  churn(scaled(3000, 400, 200), [&](int i) {
    cudaStream_t stream;
    cudaEvent_t event;
    OK(pyncclCpuStreamCreate(&stream));
    OK(pyncclCpuEventCreate(&event));
    static float x = 1;
    if (i % 3 == 0) {
      OK(sum(&x, 1, comm, stream));  // destroyed with its work queued
    } else {
      use(comm, 1, stream);
    }
    OK(pyncclCpuEventRecord(comm, event, stream));
    OK(pyncclCpuStreamDestroy(stream));
    OK(pyncclCpuEventSynchronize(event, 20000));
    OK(pyncclCpuEventDestroy(event));
  });
  OK(ncclCommDestroy(comm));
}

// Programs of all kinds by turns, for PYNCCL_TEST_SECONDS; what a tenth of the time needs, the rest must not
// add to.
const int g_seconds = int(from_environment("PYNCCL_TEST_SECONDS", 8));

TEST_CASE("random programs") {
  alarm(unsigned(g_seconds) + 110);
  mallopt(M_ARENA_MAX, 1);
  std::mt19937 random(1);
  Stopwatch watch;
  Held early;
  long cycles = 0;
  for (bool warm = false; watch.seconds() < g_seconds && failures == 0; ++cycles) {
    if (!warm && watch.seconds() > std::min(g_seconds / 4.0, 60.0)) {
      early = settled();
      warm = true;
      cycles = 0;
    }
    int ranks = 1 + int(random() % 3), count = 1 + int(random() % 20000);
    bool aborts = random() % 4 == 0, splits = random() % 2 == 0;
    at_step("cycle %ld: %d ranks, count %d, abort %d, split %d", cycles, ranks, count, aborts, splits);
    ncclUniqueId id = new_id();
    Meeting all_done(ranks);  // an abort before it would be right to end a rank that still waits
    as_threads(ranks, [&](int rank) {
      ncclComm_t comm = nullptr, child = nullptr;
      OK(ncclCommInitRank(&comm, ranks, id, rank));
      std::vector<float> x(size_t(count), 1);
      OK(sum(x.data(), x.size(), comm));
      OK(synchronize(comm, nullptr, 20000));
      if (splits) OK(ncclCommSplit(comm, rank % 2, 0, &child, nullptr));
      if (child) OK(sum(x.data(), x.size(), child));
      if (child && !aborts) OK(synchronize(child, nullptr, 20000));
      all_done();
      for (ncclComm_t c : {child, comm}) OK(aborts ? ncclCommAbort(c) : ncclCommDestroy(c));
    });
  }
  printf("     %ld cycles\n", cycles);
  check_growth(early, settled(), cycles);
}

// ---- communicators of groups that failed or were not meant ----

using EndCall = ncclResult_t (*)(ncclComm_t);

void ends_at_once(const char* what, const std::function<void(ncclComm_t*)>& make_in_group) {
  for (EndCall end : {EndCall(ncclCommAbort), EndCall(ncclCommDestroy)}) {
    int status = in_child([&] {
      alarm(20);
      at_step("%s: %s", what, end == ncclCommAbort ? "ncclCommAbort" : "ncclCommDestroy");
      ncclComm_t comm = nullptr;
      make_in_group(&comm);
      Stopwatch watch;
      ncclResult_t r = end(comm);
      CHECK((r == ncclSuccess || r == ncclInvalidArgument));
      CHECK(watch.seconds() < 10);
      ncclComm_t next = alone();
      use(next, 1);
      OK(ncclCommDestroy(next));
    });
    CHECK_EQ(status, 0);
  }
}

TEST_CASE("a communicator of a failed group ends") {
  ends_at_once("a failed group", [](ncclComm_t* comm) {
    ncclComm_t wrong = nullptr;
    OK(ncclGroupStart());
    OK(ncclCommInitRank(comm, 1, new_id(), 0));
    RESULT(ncclCommInitRank(&wrong, 0, new_id(), 0), ncclInvalidArgument);
    RESULT(ncclGroupEnd(), ncclInvalidArgument);
    CHECK(wrong == nullptr);
  });
}

TEST_CASE("a communicator of a simulated group ends") {
  ends_at_once("a simulated group", [](ncclComm_t* comm) {
    OK(ncclGroupStart());
    OK(ncclCommInitRank(comm, 1, new_id(), 0));
    OK(ncclGroupSimulateEnd(nullptr));
  });
}

TEST_CASE("a communicator of a group that mixes ends") {
  ends_at_once("a group of calls and creations", [](ncclComm_t* comm) {
    ncclComm_t other = alone();
    float x = 1;
    OK(ncclGroupStart());
    OK(ncclCommInitRank(comm, 1, new_id(), 0));
    OK(sum(&x, 1, other));
    ncclResult_t r = ncclGroupEnd();
    CHECK((r == ncclSuccess || r == ncclInvalidUsage));
    OK(ncclCommAbort(other));
  });
}

// ncclCommInitAll is one step of a group for several communicators.
TEST_CASE("communicators made together end") {
  ends_at_once("all ranks in a failed group", [](ncclComm_t* comm) {
    ncclComm_t wrong = nullptr;
    OK(ncclGroupStart());
    OK(ncclCommInitAll(comm, 1, nullptr));
    RESULT(ncclCommInitRank(&wrong, 0, new_id(), 0), ncclInvalidArgument);
    RESULT(ncclGroupEnd(), ncclInvalidArgument);
  });
  ends_at_once("all ranks in a simulated group", [](ncclComm_t* comm) {
    OK(ncclGroupStart());
    OK(ncclCommInitAll(comm, 1, nullptr));
    OK(ncclGroupSimulateEnd(nullptr));
  });
}

// What a rank does for each other one is bounded by the ranks that came, not by those that were announced.
TEST_CASE("a communicator of countless ranks ends") {
  ends_at_once("a simulated group of 2,000,000,000 ranks", [](ncclComm_t* comm) {
    OK(ncclGroupStart());
    ncclResult_t r = ncclCommInitRank(comm, 2000000000, new_id(), 0);
    CHECK((r == ncclSuccess || r == ncclSystemError));
    ncclGroupSimulateEnd(nullptr);
  });
}

// ---- unique ids ----

double cpu_seconds() {
  rusage used;
  getrusage(RUSAGE_SELF, &used);
  return double(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         double(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

double creation_seconds() {
  return least_seconds(30, [] { OK(ncclCommDestroy(alone())); });
}

TEST_CASE("unique ids without end") {
  double before = creation_seconds();
  ncclUniqueId kept = new_id();
  for (int i = 0; i < scaled(200000, 20000, 20000) && failures == 0; ++i) new_id();
  double after = creation_seconds();
  if (after > 10 * before) {
    FAIL_CHECK(formatted("a creation takes %.3f ms, before the ids %.3f ms", after * 1e3, before * 1e3));
  }
  double idle = 1e9;  // the least of three: the machine may have charged this process for others once
  for (int i = 0; i < 3; ++i) {
    double used = cpu_seconds();
    sleep(1);
    idle = std::min(idle, cpu_seconds() - used);
  }
  if (idle > 0.03) {
    FAIL_CHECK(formatted("an idle process uses %.1f %% of a core", idle * 100));
  }
  ncclComm_t comm = nullptr;  // an id of before is still good
  OK(ncclCommInitRank(&comm, 1, kept, 0));
  OK(ncclCommDestroy(comm));
}

}  // namespace
