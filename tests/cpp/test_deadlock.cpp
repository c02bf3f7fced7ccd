// Ranks that wait for each other through several communicators, ranks that only look as if they did, and
// ranks that derive communicators by different calls.
#include "ranks.hpp"

using namespace testing;

namespace {

// In each program a communicator's calls have a count of their own, by which the error's text shows them.
constexpr size_t kCounts[] = {1111, 2222, 3333};

std::string called(int comm) { return "count " + std::to_string(kCounts[comm]); }

using Run = void (*)(int, const std::function<void(int)>&);

ncclComm_t join(const ncclUniqueId& id, int nranks, int rank) {
  ncclComm_t comm = nullptr;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  return comm;
}

struct Buffers {
  std::vector<float> data[3] = {std::vector<float>(kCounts[0], 1), std::vector<float>(kCounts[1], 1),
                                std::vector<float>(kCounts[2], 1)};
  ncclResult_t sum(int comm, ncclComm_t handle, cudaStream_t stream = nullptr) {
    return testing::sum(data[comm].data(), kCounts[comm], handle, stream);
  }
  void check(int comm, float want) const {
    CHECK_EQ(data[comm].front(), want);
    CHECK_EQ(data[comm].back(), want);
  }
};

// Whether one of the communicators gets an error within a second, in words about a deadlock.
bool is_told(const std::vector<ncclComm_t>& comms) {
  for (int i = 0; i < 100; ++i, usleep(10000))
    for (ncclComm_t comm : comms) {
      ncclResult_t state = ncclSuccess;
      OK(ncclCommGetAsyncError(comm, &state));
      if (state == ncclInvalidUsage && contains(ncclGetLastError(comm), "deadlock")) return true;
    }
  return false;
}

// A rank's calls stop at its first error, which has to be the deadlock, in words that show the calls
// concerned. Where others fail first, the data for all calls of a rank may arrive before it hears of that:
// then only its communicators tell.
void expect_deadlock(const std::vector<std::function<ncclResult_t()>>& calls, const std::vector<int>& comms,
                     bool queued, const std::vector<ncclComm_t>& handles = {}) {
  for (auto& call : calls) {
    ncclResult_t r = call();
    if (r == ncclSuccess) continue;
    std::string text = last_error();
    CHECK_EQ(std::string(name_of(r)), std::string("ncclInvalidUsage"));
    SAYS(text, "deadlock");
    SAYS(text, queued ? "has queued behind its own; calls of one group start together" : "has not made");
    for (int comm : comms) SAYS(text, called(comm));
    return;
  }
  if (!is_told(handles)) FAIL_CHECK("a deadlocked rank has no error");
}

void abort_all(std::initializer_list<ncclComm_t> comms) {
  for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
}

// ---- deadlocks ----

// Rank 0 calls on `a` and then on `b`, rank 1 the other way round.
void opposite_order(Run run, bool wait_between) {
  ncclUniqueId ids[] = {new_id(), new_id()};
  Meeting all_ended(2);
  Stopwatch watch;
  run(2, [&](int rank) {
    ncclComm_t comm[] = {join(ids[0], 2, rank), join(ids[1], 2, rank)};
    Buffers x;
    int first = rank, second = 1 - rank;
    std::vector<std::function<ncclResult_t()>> calls;
    calls.push_back([&] { return x.sum(first, comm[first]); });
    if (wait_between) calls.push_back([&] { return synchronize(comm[first]); });
    calls.push_back([&] { return x.sum(second, comm[second]); });
    calls.push_back([&] { return synchronize(comm[first]); });
    calls.push_back([&] { return synchronize(comm[second]); });
    expect_deadlock(calls, {0, 1}, !wait_between);
    all_ended();
    abort_all({comm[0], comm[1]});
  });
  CHECK(watch.seconds() < 60);
}

TEST_CASE("opposite order on a stream") { opposite_order(as_threads, false); }
TEST_CASE("opposite order one call after the other") { opposite_order(as_threads, true); }
TEST_CASE("opposite order on a stream in processes") { opposite_order(as_processes, false); }
TEST_CASE("opposite order one call after the other in processes") { opposite_order(as_processes, true); }

// The ranks between the two are only late. A rank that waits for many asks others in each round.
void two_among_many(Run run) {
  constexpr int kRanks = 40;
  const ncclUniqueId ids[] = {new_id(), new_id()};
  Meeting made(kRanks), told(kRanks);
  Stopwatch watch;
  run(kRanks, [&](int rank) {
    const bool last = rank == kRanks - 1, waits = rank == kRanks / 2 || last;
    ncclComm_t comm[] = {join(ids[0], kRanks, rank), waits ? join(ids[1], 2, last) : nullptr};
    made();
    Buffers x;
    if (waits) {
      const int first = last ? 0 : 1;
      expect_deadlock(
          {[&] { return x.sum(first, comm[first]); }, [&] { return x.sum(1 - first, comm[1 - first]); },
           [&] { return synchronize(comm[0]); }, [&] { return synchronize(comm[1]); }},
          {0, 1}, true);
    }
    told();
    OK(ncclCommAbort(comm[0]));
    if (waits) OK(ncclCommAbort(comm[1]));
  });
  CHECK(watch.seconds() < 60);
}

TEST_CASE("two ranks wait for each other among many") { two_among_many(as_threads); }
TEST_CASE("two ranks wait for each other among many in processes") { two_among_many(as_processes); }

// Communicator c has the ranks c and c+1. Each rank calls on the one it has with its successor first.
void cycle_of_three(Run run, bool wait_between) {
  ncclUniqueId ids[] = {new_id(), new_id(), new_id()};
  Meeting all_ended(3);
  run(3, [&](int rank) {
    int next = rank, previous = (rank + 2) % 3;
    ncclComm_t comm[3] = {};
    for (int c = 0; c < 3; ++c)
      if (c == next || c == previous) comm[c] = join(ids[c], 2, c == next ? 0 : 1);
    Buffers x;
    std::vector<std::function<ncclResult_t()>> calls;
    calls.push_back([&] { return x.sum(next, comm[next]); });
    if (wait_between) calls.push_back([&] { return synchronize(comm[next]); });
    calls.push_back([&] { return x.sum(previous, comm[previous]); });
    calls.push_back([&] { return synchronize(comm[next]); });
    calls.push_back([&] { return synchronize(comm[previous]); });
    expect_deadlock(calls, {0, 1, 2}, !wait_between, {comm[next], comm[previous]});
    all_ended();
    abort_all({comm[next], comm[previous]});
  });
}

TEST_CASE("cycle over three communicators") { cycle_of_three(as_threads, false); }
TEST_CASE("cycle over three communicators one call after the other") { cycle_of_three(as_threads, true); }
TEST_CASE("cycle over three communicators in processes") { cycle_of_three(as_processes, false); }

// The order is made by an event: rank 0's stream for `b` waits for its stream for `a`.
TEST_CASE("an event closes the cycle") {
  ncclUniqueId ids[] = {new_id(), new_id()};
  Meeting all_ended(2);
  as_threads(2, [&](int rank) {
    ncclComm_t comm[] = {join(ids[0], 2, rank), join(ids[1], 2, rank)};
    int first = rank, second = 1 - rank;
    cudaStream_t streams[2];
    cudaEvent_t event;
    for (cudaStream_t& s : streams) OK(pyncclCpuStreamCreate(&s));
    OK(pyncclCpuEventCreate(&event));
    Buffers x;
    OK(x.sum(first, comm[first], streams[0]));
    OK(pyncclCpuEventRecord(comm[first], event, streams[0]));
    OK(pyncclCpuStreamWaitEvent(comm[second], streams[1], event));
    OK(x.sum(second, comm[second], streams[1]));
    expect_deadlock({[&] { return synchronize(comm[first], streams[0]); },
                     [&] { return synchronize(comm[second], streams[1]); }},
                    {0, 1}, true);
    all_ended();
    abort_all({comm[0], comm[1]});
    for (cudaStream_t s : streams) OK(pyncclCpuStreamDestroy(s));
    OK(pyncclCpuEventDestroy(event));
  });
}

// Each rank sends first: no collective is part of the cycle.
TEST_CASE("two sends that face each other") {
  ncclUniqueId id = new_id();
  Meeting all_ended(2);
  as_threads(2, [&](int rank) {
    ncclComm_t comm = join(id, 2, rank);
    std::vector<float> data(1 << 20);
    OK(ncclSend(data.data(), data.size(), ncclFloat32, 1 - rank, comm, nullptr));
    RESULT(synchronize(comm), ncclInvalidUsage);
    SAYS(last_error(), "has not made; sends and receives of one group, or of send_recv, start together");
    all_ended();
    OK(ncclCommAbort(comm));
  });
}

// Rank 0 waits in a collective, part by part; rank 1 in a call that meets the other ranks.
using Derive = ncclResult_t (*)(int rank, ncclComm_t parent, ncclComm_t* made);

ncclResult_t split(int, ncclComm_t parent, ncclComm_t* made) {
  return ncclCommSplit(parent, 0, 0, made, nullptr);
}
ncclResult_t suspend(int, ncclComm_t parent, ncclComm_t*) {
  return ncclCommSuspend(parent, NCCL_SUSPEND_MEM);
}

void collective_and_meeting(Run run, Derive meet, const char* name) {
  ncclUniqueId id = new_id();
  Meeting all_ended(2);
  run(2, [&](int rank) {
    ncclComm_t comm = join(id, 2, rank), made = nullptr;
    Buffers x;
    Stopwatch watch;
    ncclResult_t r = rank == 0 ? x.sum(0, comm) : meet(rank, comm, &made);
    while (rank == 0 && (r == ncclSuccess || r == ncclInProgress) && watch.seconds() < 60)
      r = pyncclCpuStreamAwait(comm, nullptr, 50);
    std::string text = last_error();
    RESULT(r, ncclInvalidUsage);
    SAYS(text, "deadlock: ");
    SAYS(text, "rank 0 waits in AllReduce(count 1111, float32, sum) #1");
    SAYS(text, std::string("rank 1 waits in ") + name);
    all_ended();
    OK(ncclCommAbort(comm));
  });
}

TEST_CASE("a collective and a split") { collective_and_meeting(as_threads, split, "ncclCommSplit"); }
TEST_CASE("a collective and a split in processes") {
  collective_and_meeting(as_processes, split, "ncclCommSplit");
}
TEST_CASE("a collective and a suspend") { collective_and_meeting(as_threads, suspend, "ncclCommSuspend"); }

TEST_CASE("splits of two communicators in opposite order") {
  ncclUniqueId ids[] = {new_id(), new_id()};
  Meeting all_ended(2);
  as_processes(2, [&](int rank) {
    ncclComm_t comm[] = {join(ids[0], 2, rank), join(ids[1], 2, rank)}, made = nullptr;
    RESULT(split(rank, comm[rank], &made), ncclInvalidUsage);
    SAYS(last_error(), "deadlock: ");
    SAYS(last_error(), "waits in ncclCommSplit of another communicator");
    all_ended();
    abort_all({comm[0], comm[1]});
  });
}

// ---- what is no deadlock ----

// Rank 0 does not wait for its collective before it splits.
TEST_CASE("a collective in flight and a split") {
  ncclUniqueId id = new_id();
  as_processes(2, [&](int rank) {
    ncclComm_t comm = join(id, 2, rank), made = nullptr;
    Buffers x;
    if (rank == 0) {
      OK(x.sum(0, comm));
      sleep(13);
    }
    OK(split(rank, comm, &made));
    if (rank == 1) OK(x.sum(0, comm));
    OK(synchronize(comm));
    x.check(0, 2);
    for (ncclComm_t c : {comm, made}) OK(ncclCommDestroy(c));
  });
}

// The calls of `a` and `b` are in opposite order, on streams of their own: each rank has made both.
TEST_CASE("opposite order on two streams") {
  ncclUniqueId ids[] = {new_id(), new_id()};
  as_threads(2, [&](int rank) {
    ncclComm_t comm[] = {join(ids[0], 2, rank), join(ids[1], 2, rank)};
    cudaStream_t streams[2];
    for (cudaStream_t& s : streams) OK(pyncclCpuStreamCreate(&s));
    Buffers x;
    for (int c : {rank, 1 - rank}) OK(x.sum(c, comm[c], streams[c]));
    for (int c : {rank, 1 - rank}) OK(synchronize(comm[c], streams[c]));
    for (int c : {0, 1}) x.check(c, 2);
    for (int c : {0, 1}) OK(ncclCommDestroy(comm[c]));
    for (cudaStream_t s : streams) OK(pyncclCpuStreamDestroy(s));
  });
}

// Rank 0 waits in `a`, rank 1 in `b`, until a second thread of rank 0 makes the call on `b` that is missing.
void another_thread_makes_the_missing_call(Run run) {
  ncclUniqueId ids[] = {new_id(), new_id()};
  run(2, [&](int rank) {
    ncclComm_t comm[] = {join(ids[0], 2, rank), join(ids[1], 2, rank)};
    Buffers x;
    cudaStream_t stream;
    OK(pyncclCpuStreamCreateWithFlags(&stream, 1));  // it does not wait for the legacy stream
    std::thread late([&] {
      if (rank != 0) return;
      sleep(3);
      OK(x.sum(1, comm[1], stream));
      OK(synchronize(comm[1], stream));
    });
    for (int c : {0, 1}) {
      int at = rank == 0 ? c : 1 - c;
      if (rank == 0 && at == 1) continue;
      OK(x.sum(at, comm[at]));
      OK(synchronize(comm[at]));
    }
    late.join();
    for (int c : {0, 1}) x.check(c, 2);
    for (int c : {0, 1}) OK(ncclCommDestroy(comm[c]));
    OK(pyncclCpuStreamDestroy(stream));
  });
}
TEST_CASE("another thread of a thread rank calls") { another_thread_makes_the_missing_call(as_threads); }
TEST_CASE("another thread of a process calls") { another_thread_makes_the_missing_call(as_processes); }

// Rank 0 is late for both communicators, on which rank 1 waits with a thread and a stream each.
TEST_CASE("a slow rank is waited for") {
  ncclUniqueId ids[] = {new_id(), new_id()};
  as_processes(2, [&](int rank) {
    ncclComm_t comm[] = {join(ids[0], 2, rank), join(ids[1], 2, rank)};
    Buffers x;
    if (rank == 0) sleep(4);
    as_threads(2, [&](int c) {
      cudaStream_t stream;
      OK(pyncclCpuStreamCreate(&stream));
      OK(x.sum(c, comm[c], stream));
      OK(synchronize(comm[c], stream));
      OK(pyncclCpuStreamDestroy(stream));
    });
    for (int c : {0, 1}) x.check(c, 2);
    for (int c : {0, 1}) OK(ncclCommDestroy(comm[c]));
  });
}

// Rank 1 is in `b` with a third rank that is slow; rank 0 waits for rank 1 in `a`: a chain, no cycle.
TEST_CASE("a chain is waited for") {
  ncclUniqueId ids[] = {new_id(), new_id()};
  as_processes(3, [&](int rank) {
    Buffers x;
    ncclComm_t a = rank < 2 ? join(ids[0], 2, rank) : nullptr;
    ncclComm_t b = rank > 0 ? join(ids[1], 2, rank - 1) : nullptr;
    if (rank == 2) sleep(4);
    if (b) {
      OK(x.sum(1, b));
      OK(synchronize(b));
    }
    if (a) {
      OK(x.sum(0, a));
      OK(synchronize(a));
    }
    for (ncclComm_t comm : {a, b}) OK(ncclCommDestroy(comm));
  });
}

// ---- different calls that derive a communicator ----

ncclResult_t shrink(int, ncclComm_t parent, ncclComm_t* made) {
  int last = 2;
  return ncclCommShrink(parent, &last, 1, made, nullptr, NCCL_SHRINK_DEFAULT);
}
// The parent may have failed by another rank's word before this one calls.
ncclResult_t grow(int rank, ncclComm_t parent, ncclComm_t* made) {
  ncclUniqueId id;
  if (rank == 0)
    if (ncclResult_t r = ncclCommGetUniqueId(parent, &id); r != ncclSuccess) return r;
  return ncclCommGrow(parent, 4, rank == 0 ? &id : nullptr, -1, made, nullptr);
}
// The first two of three ranks differ; the third joins rank 0, or does nothing, as one that shrinks lets it.
void different_calls(Derive of_rank_0, Derive of_rank_1, bool third_joins) {
  set("PYNCCL_CPU_INIT_TIMEOUT", "15");
  ncclUniqueId id = new_id();
  Meeting all_ended(3);
  as_threads(3, [&](int rank) {
    ncclComm_t parent = join(id, 3, rank), made = nullptr;
    Stopwatch watch;
    if (rank < 2 || third_joins) {
      ncclResult_t r = (rank == 1 ? of_rank_1 : of_rank_0)(rank, parent, &made);
      std::string text = last_error();
      RESULT(r, ncclInvalidUsage);
      CHECK_MESSAGE(
          (contains(text, "called another function") || contains(text, "the ranks called different things")),
          "rank ", rank, ": ", text);
      CHECK(watch.seconds() < 10);
      CHECK(made == nullptr);
    }
    all_ended();
    OK(ncclCommAbort(parent));
  });
}

TEST_CASE("split and shrink") { different_calls(split, shrink, true); }
TEST_CASE("split and shrink without the third") { different_calls(split, shrink, false); }
TEST_CASE("shrink and split") { different_calls(shrink, split, false); }
TEST_CASE("split and grow") { different_calls(split, grow, true); }
TEST_CASE("grow and split") { different_calls(grow, split, true); }
TEST_CASE("grow and shrink") { different_calls(grow, shrink, true); }
TEST_CASE("split and suspend") { different_calls(split, suspend, true); }

const AtOnce kAtOnce(6);

}  // namespace
