// Handles under attack: calls that race with the end of their communicator, groups whose stream or
// communicator goes away, events by the million, handles that are stale, invented or of another kind.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>

#include "ranks.hpp"

using namespace testing;

namespace {

// ---- a call in one thread while another ends its communicator ----

enum class Call { AllReduce, StreamSynchronize, GetAsyncError, CommCount, GetLastError };
enum class End { Abort, Destroy, Finalize, Revoke };

float g_data[64];

ncclResult_t make(Call call, ncclComm_t comm) {
  int count;
  ncclResult_t async;
  switch (call) {
    case Call::AllReduce:
      return sum(g_data, 64, comm);
    case Call::StreamSynchronize:
      return synchronize(comm);
    case Call::GetAsyncError:
      return ncclCommGetAsyncError(comm, &async);
    case Call::CommCount:
      count = 0;
      if (ncclCommCount(comm, &count) != ncclSuccess) return ncclInvalidArgument;
      return count == 1 || count == 2 ? ncclSuccess : ncclInternalError;
    case Call::GetLastError:
      return ncclGetLastError(comm) ? ncclSuccess : ncclInternalError;
  }
  return ncclInternalError;
}

ncclResult_t make(End end, ncclComm_t comm) {
  switch (end) {
    case End::Abort:
      return ncclCommAbort(comm);
    case End::Destroy:
      return ncclCommDestroy(comm);
    case End::Finalize:
      return ncclCommFinalize(comm);
    case End::Revoke:
      return ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT);
  }
  return ncclInternalError;
}

// The thread that calls, without pause, on whatever handle it was given.
class Caller {
 public:
  explicit Caller(Call call) : call_(call), thread_([this] { work(); }) {}
  ~Caller() {
    stop_ = true;
    thread_.join();
  }
  // Between these two it calls, and else sleeps.
  void begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_ = true;
    changed_.notify_one();
  }
  void end() { awake_ = false; }
  void give(ncclComm_t comm) { comm_ = comm; }
  // Returns when the first call on the handle has been made; or soon, where other programs have its core.
  void start(ncclComm_t comm) {
    uint64_t before = calls_;
    give(comm);
    for (int i = 0; i < 20000 && calls_ == before; ++i) asm volatile("");
  }
  // Returns when no call is underway any more.
  void finish() {
    comm_ = nullptr;
    while (busy_) usleep(100);
  }
  // What no call of any round may have answered.
  void check_answers() const {
    for (size_t r = 0; r < answers_.size(); ++r) {
      ncclResult_t result = ncclResult_t(r);
      if (result == ncclSuccess || result == ncclInvalidArgument || result == ncclInvalidUsage ||
          result == ncclInProgress || answers_[r] == 0)
        continue;
      FAIL_CHECK(formatted("%ld times %s, first: %s", answers_[r], name_of(result), texts_[r].c_str()));
    }
  }

 private:
  void work() {
    while (!stop_) {
      if (!awake_) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, std::chrono::milliseconds(20), [&] { return awake_.load(); });
        continue;
      }
      busy_ = true;
      for (ncclComm_t comm; (comm = comm_.load()) != nullptr; ++calls_) {
        size_t r = std::min(size_t(make(call_, comm)), answers_.size() - 1);
        if (answers_[r]++ == 0) texts_[r] = last_error();
      }
      busy_ = false;
    }
  }
  const Call call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<ncclComm_t> comm_{nullptr};
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> stop_{false}, awake_{false}, busy_{false};
  std::array<long, 10> answers_{};
  std::array<std::string, 10> texts_;
  std::thread thread_;  // last: it uses the others
};

// Puts the end at another point of the calls in each round.
void idle_for(int round) {
  for (int i = 0, n = round * 7919 % 2000; i < n; ++i) asm volatile("");
}

void end_it(End end, ncclComm_t comm) {
  OK(make(end, comm));
  if (end == End::Finalize || end == End::Revoke) return;
  int count;
  RESULT(ncclCommCount(comm, &count), ncclInvalidArgument);
}

void clean_up(End end, ncclComm_t comm) {
  if (end != End::Finalize && end != End::Revoke) return;
  // A finalize that comes between the calls of two ranks has failed on one of them; the other hears of it
  // here.
  if (ncclResult_t r = ncclCommDestroy(comm); r != ncclInvalidUsage || end != End::Finalize) OK(r);
}

void one_rank_rounds(Call call, End end) {
  Caller caller(call);
  constexpr int kBatch = 100;
  for (int batch = 0; batch < scaled(120, 6, 3) && failures == 0; ++batch) {
    std::vector<ncclComm_t> comms;
    for (int i = 0; i < kBatch; ++i) {
      comms.push_back(alone());
      if (call == Call::StreamSynchronize) OK(sum(g_data, 64, comms.back()));
    }
    caller.begin();
    for (int i = 0; i < kBatch; ++i) {
      at_step("1 rank, round %d", batch * kBatch + i);
      caller.start(comms[size_t(i)]);
      idle_for(i);
      end_it(end, comms[size_t(i)]);
    }
    caller.finish();
    caller.end();
    for (ncclComm_t comm : comms) clean_up(end, comm);
  }
  caller.check_answers();
}

// Rank 1 ends its side together with rank 0 where ends are collective, else after it, since rank 0 would be
// right to report that rank 1 aborted. Calls that are not matched, rank 1's one or rank 0's that
// synchronizes, hold up a destroy until it is found that nothing will match them: rounds of that are few.
void two_rank_rounds(Call call, End end) {
  Caller caller(call);
  bool collective = end == End::Destroy || end == End::Finalize;
  bool unmatched = call == Call::AllReduce || call == Call::StreamSynchronize;
  int rounds = unmatched && end == End::Destroy ? scaled(20, 10, 8) : scaled(300, 60, 30);
  static float theirs[64];
  for (int round = 0; round < rounds && failures == 0; ++round) {
    at_step("2 ranks, round %d", round);
    std::vector<ncclComm_t> comms = together(2);
    if (call == Call::AllReduce) OK(sum(theirs, 64, comms[1]));
    if (call == Call::StreamSynchronize) OK(sum(g_data, 64, comms[0]));
    caller.begin();
    if (call == Call::StreamSynchronize)
      caller.give(comms[0]);
    else
      caller.start(comms[0]);
    idle_for(round);
    std::thread other([&] {
      if (collective) make(end, comms[1]);
    });
    make(end, comms[0]);
    other.join();
    caller.finish();
    caller.end();
    if (!collective) make(end, comms[1]);
    for (ncclComm_t comm : comms) clean_up(end, comm);
  }
  caller.check_answers();
}

template <Call call, End end>
void race() {
  one_rank_rounds(call, end);
  two_rank_rounds(call, end);
}

// ---- groups whose stream or communicator goes away ----

// Both ranks of two communicators in this thread; rank 0 of `a` is what a group loses.
struct Pairs {
  std::vector<ncclComm_t> a = together(2), b = together(2);
  float x[2][100], y[2][100];
  Pairs() {
    std::fill_n(&x[0][0], 200, 1.0f);
    std::fill_n(&y[0][0], 200, 1.0f);
  }
  // Each rank of `comms` calls once, and each gets the sum: no call of rank 0 was left over.
  static void still_match(const std::vector<ncclComm_t>& comms) {
    float z[2] = {1, 2};
    for (int r = 0; r < 2; ++r) OK(sum(&z[r], 1, comms[size_t(r)]));
    for (ncclComm_t comm : comms) OK(synchronize(comm, nullptr, 20000));
    CHECK_EQ(z[0], 3.0f);
    CHECK_EQ(z[1], 3.0f);
  }
  void nothing_was_issued() {
    usleep(20000);
    for (int i = 0; i < 100; ++i) CHECK((x[0][i] == 1 && y[0][i] == 1));
  }
};

// `lose` takes away what `what` names, after a group has it in a call and before the group ends.
void group_that_loses(Pairs& pairs, cudaStream_t stream, const void* what,
                      const std::function<void()>& lose) {
  OK(ncclGroupStart());
  OK(sum(pairs.y[0], 100, pairs.b[0]));
  OK(sum(pairs.x[0], 100, pairs.a[0], stream));
  lose();
  ncclResult_t r = ncclGroupEnd();
  CHECK((r == ncclInvalidArgument || r == ncclInvalidUsage));
  SAYS(last_error(), pointer(what));
  pairs.nothing_was_issued();
  Pairs::still_match(pairs.b);
}

TEST_CASE("a stream destroyed inside a group") {
  Pairs pairs;
  cudaStream_t stream;
  OK(pyncclCpuStreamCreate(&stream));
  group_that_loses(pairs, stream, stream, [&] { OK(pyncclCpuStreamDestroy(stream)); });
  Pairs::still_match(pairs.a);
  for (auto* comms : {&pairs.a, &pairs.b})
    for (ncclComm_t comm : *comms) OK(ncclCommAbort(comm));
}

// The stream's slot may be used again before the group ends: the new stream is not the old one.
TEST_CASE("a stream replaced inside a group") {
  Pairs pairs;
  cudaStream_t stream, next;
  OK(pyncclCpuStreamCreate(&stream));
  group_that_loses(pairs, stream, stream, [&] {
    OK(pyncclCpuStreamDestroy(stream));
    OK(pyncclCpuStreamCreate(&next));
  });
  CHECK(next != stream);
  Pairs::still_match(pairs.a);
  OK(pyncclCpuStreamDestroy(next));
  for (auto* comms : {&pairs.a, &pairs.b})
    for (ncclComm_t comm : *comms) OK(ncclCommAbort(comm));
}

void a_communicator_ended_inside_a_group(End end) {
  Pairs pairs;
  ncclComm_t gone = pairs.a[0];
  group_that_loses(pairs, nullptr, gone, [&] { std::thread([&] { OK(make(end, gone)); }).join(); });
  RESULT(ncclCommAbort(gone), ncclInvalidArgument);
  OK(ncclCommAbort(pairs.a[1]));
  for (ncclComm_t comm : pairs.b) OK(ncclCommAbort(comm));
}
TEST_CASE("a communicator aborted inside a group") { a_communicator_ended_inside_a_group(End::Abort); }
TEST_CASE("a communicator destroyed inside a group") { a_communicator_ended_inside_a_group(End::Destroy); }

// The thread of the group itself ends it: the end is part of the group, so the group mixes what cannot be
// mixed.
TEST_CASE("a communicator ended by the thread of the group") {
  for (End end : {End::Abort, End::Destroy}) {
    Pairs pairs;
    OK(ncclGroupStart());
    OK(sum(pairs.y[0], 100, pairs.b[0]));
    OK(sum(pairs.x[0], 100, pairs.a[0]));
    make(end, pairs.a[0]);
    CHECK(ncclGroupEnd() != ncclSuccess);
    CHECK(!last_error().empty());
    pairs.nothing_was_issued();
    Pairs::still_match(pairs.b);
    make(End::Abort, pairs.a[0]);  // whether it is still there or not: this returns
    int count;
    RESULT(ncclCommCount(pairs.a[0], &count), ncclInvalidArgument);
    OK(ncclCommAbort(pairs.a[1]));
    for (ncclComm_t comm : pairs.b) OK(ncclCommAbort(comm));
  }
}

// ---- events ----

// A stream whose collective waits for rank 1, and what ends that wait.
struct Blocked {
  std::vector<ncclComm_t> comms = together(2);
  cudaStream_t a, b, c;
  cudaEvent_t event, reached;
  float x[2] = {1, 2};
  Blocked() {
    for (cudaStream_t* s : {&a, &b, &c}) OK(pyncclCpuStreamCreate(s));
    for (cudaEvent_t* e : {&event, &reached}) OK(pyncclCpuEventCreate(e));
    OK(sum(&x[0], 1, comms[0], a));
  }
  ~Blocked() {
    for (cudaStream_t s : {a, b, c}) OK(pyncclCpuStreamDestroy(s));
    for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
  }
  void record(cudaEvent_t e, cudaStream_t on) { OK(pyncclCpuEventRecord(nullptr, e, on)); }
  void wait(cudaStream_t on, cudaEvent_t e) { OK(pyncclCpuStreamWaitEvent(nullptr, on, e)); }
  void re_record_on_idle_stream() {
    record(event, c);
    OK(synchronize(nullptr, c, 20000));
    OK(pyncclCpuEventQuery(event));
  }
  void let_go() { OK(sum(&x[1], 1, comms[1])); }
  void b_waits_until_let_go() {
    record(reached, b);
    RESULT(synchronize(nullptr, b, 300), ncclInProgress);
    RESULT(pyncclCpuEventQuery(reached), ncclInProgress);
    CHECK_EQ(x[0], 1.0f);
    let_go();
    OK(synchronize(nullptr, b, 20000));
    CHECK_EQ(x[0], 3.0f);
  }
};

TEST_CASE("a stream goes on waiting for an event that is recorded again") {
  Blocked s;
  s.record(s.event, s.a);
  s.wait(s.b, s.event);
  s.re_record_on_idle_stream();
  s.b_waits_until_let_go();
  for (cudaEvent_t e : {s.event, s.reached}) OK(pyncclCpuEventDestroy(e));
}

TEST_CASE("a stream goes on waiting for an event that is destroyed") {
  Blocked s;
  s.record(s.event, s.a);
  s.wait(s.b, s.event);
  OK(pyncclCpuEventDestroy(s.event));
  s.b_waits_until_let_go();
  OK(pyncclCpuEventDestroy(s.reached));
}

// A wait is for the newest record at the time of the wait: not for an older one, not for a later one.
TEST_CASE("a wait binds to the newest record") {
  Blocked s;
  s.wait(s.b, s.event);  // never recorded: nothing to wait for
  OK(synchronize(nullptr, s.b, 20000));
  s.record(s.event, s.a);
  RESULT(pyncclCpuEventQuery(s.event), ncclInProgress);
  s.re_record_on_idle_stream();
  OK(pyncclCpuEventSynchronize(s.event, 20000));
  s.wait(s.b, s.event);
  OK(synchronize(nullptr, s.b, 20000));
  s.record(s.event, s.a);
  s.wait(s.b, s.event);
  s.b_waits_until_let_go();
  for (cudaEvent_t e : {s.event, s.reached}) OK(pyncclCpuEventDestroy(e));
}

// ---- numbers ----

constexpr int kQueries = 50000;
constexpr double kConstant =
    5;  // within this factor a cost counts as constant; a walk of the table is 100 times

template <typename Query>
double query_cost(Query query) {
  return least_seconds(7, [&] {
    for (int i = 0; i < kQueries; ++i) query();
  });
}

void check_constant(const char* what, double early, double late) {
  if (late <= early * kConstant) return;
  FAIL_CHECK(formatted("%s: %.3f us each at first, %.3f us in the end", what, early / kQueries * 1e6,
                       late / kQueries * 1e6));
}

TEST_CASE("events without end") {
  cudaEvent_t first, event;
  OK(pyncclCpuEventCreate(&first));
  double early = query_cost([&] { pyncclCpuEventQuery(first); });
  for (int i = 0; i < scaled(3000000, 300000, 200000); ++i) {
    if (!OK(pyncclCpuEventCreate(&event)) || !OK(pyncclCpuEventDestroy(event))) return;
  }
  std::vector<cudaEvent_t> alive(size_t(scaled(100000, 20000, 10000)));
  for (int batch = 0; batch < 20; ++batch) {
    for (cudaEvent_t& e : alive)
      if (!OK(pyncclCpuEventCreate(&e))) return;
    if (batch == 19) break;
    for (cudaEvent_t e : alive)
      if (!OK(pyncclCpuEventDestroy(e))) return;
  }
  std::vector<cudaEvent_t> sorted = alive;
  std::sort(sorted.begin(), sorted.end());
  CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
  cudaEvent_t last = alive.back();
  check_constant("a query", early, query_cost([&] { pyncclCpuEventQuery(last); }));
  check_constant("a query of the first", early, query_cost([&] { pyncclCpuEventQuery(first); }));
  for (cudaEvent_t e : alive) OK(pyncclCpuEventDestroy(e));
  OK(pyncclCpuEventDestroy(first));
}

TEST_CASE("streams without end") {
  cudaStream_t first, stream;
  OK(pyncclCpuStreamCreate(&first));
  double early = query_cost([&] { pyncclCpuStreamQuery(nullptr, first); });
  for (int i = 0; i < scaled(1200000, 100000, 50000); ++i)
    if (!OK(pyncclCpuStreamCreate(&stream)) || !OK(pyncclCpuStreamDestroy(stream))) return;
  OK(pyncclCpuStreamCreate(&stream));
  check_constant("a query", early, query_cost([&] { pyncclCpuStreamQuery(nullptr, stream); }));
  OK(pyncclCpuStreamDestroy(stream));
  OK(pyncclCpuStreamDestroy(first));
}

TEST_CASE("communicators without end") {
  auto query = [](ncclComm_t comm) {
    int count;
    ncclCommCount(comm, &count);
  };
  auto create_some = [] {
    for (int i = 0; i < 50; ++i) OK(ncclCommDestroy(alone()));
  };
  ncclComm_t first = alone();
  double early = query_cost([&] { query(first); }), creation = least_seconds(5, create_some);
  for (int i = 0; i < scaled(20000, 1500, 800); ++i) {
    at_step("communicator %d", i);
    OK(ncclCommDestroy(alone()));
    if (failures) return;
  }
  ncclComm_t last = alone();
  check_constant("ncclCommCount", early, query_cost([&] { query(last); }));
  double later = least_seconds(5, create_some);
  if (later > creation * kConstant) {
    FAIL_CHECK(formatted("50 creations: %.2f ms at first, %.2f ms in the end", creation * 1e3, later * 1e3));
  }
  OK(ncclCommDestroy(last));
  OK(ncclCommDestroy(first));
}

// ---- handles that are none ----

// The exported functions that take a communicator, each with arguments that are right but for it.
void refused_as_communicator(ncclComm_t h) {
  int n, excluded[] = {0};
  ncclResult_t async;
  ncclUniqueId id;
  ncclComm_t made = nullptr;
  ncclRedOp_t op;
  ncclWindow_t window;
  uint64_t value;
  void* out;
  float x[2] = {};
  alignas(NCCL_WIN_REQUIRED_ALIGNMENT) static char page[NCCL_WIN_REQUIRED_ALIGNMENT];
  ncclCommProperties_t properties = {};
  properties.size = sizeof properties;
  properties.magic = NCCL_API_MAGIC;
  const ncclResult_t bad = ncclInvalidArgument;
  RESULT(ncclCommCount(h, &n), bad);
  RESULT(ncclCommUserRank(h, &n), bad);
  RESULT(ncclCommCuDevice(h, &n), bad);
  RESULT(ncclCommGetAsyncError(h, &async), bad);
  RESULT(ncclCommGetUniqueId(h, &id), bad);
  RESULT(ncclCommMemStats(h, ncclStatGpuMemTotal, &value), bad);
  RESULT(ncclCommQueryProperties(h, &properties), bad);
  RESULT(ncclCommFinalize(h), bad);
  RESULT(ncclCommDestroy(h), bad);
  RESULT(ncclCommAbort(h), bad);
  RESULT(ncclCommRevoke(h, NCCL_REVOKE_DEFAULT), bad);
  RESULT(ncclCommSplit(h, 0, 0, &made, nullptr), bad);
  RESULT(ncclCommShrink(h, excluded, 1, &made, nullptr, 0), bad);
  RESULT(ncclCommGrow(h, 2, nullptr, -1, &made, nullptr), bad);
  RESULT(ncclCommSuspend(h, NCCL_SUSPEND_MEM), bad);
  RESULT(ncclCommResume(h), bad);
  RESULT(ncclCommRegister(h, x, sizeof x, &out), bad);
  RESULT(ncclCommDeregister(h, x), bad);
  RESULT(ncclCommWindowRegister(h, page, sizeof page, &window, 0), bad);
  RESULT(ncclCommWindowDeregister(h, ncclWindow_t(static_cast<void*>(page))), bad);
  RESULT(ncclRedOpCreatePreMulSum(&op, x, ncclFloat32, ncclScalarHostImmediate, h), bad);
  RESULT(ncclRedOpDestroy(ncclRedOp_t(ncclNumOps), h), bad);
  RESULT(sum(x, 1, h), bad);
  RESULT(ncclReduce(x, x, 1, ncclFloat32, ncclSum, 0, h, nullptr), bad);
  RESULT(ncclBcast(x, 1, ncclFloat32, 0, h, nullptr), bad);
  RESULT(ncclBroadcast(x, x, 1, ncclFloat32, 0, h, nullptr), bad);
  RESULT(ncclReduceScatter(x, x, 1, ncclFloat32, ncclSum, h, nullptr), bad);
  RESULT(ncclAllGather(x, x, 1, ncclFloat32, h, nullptr), bad);
  RESULT(ncclAlltoAll(x, x + 1, 1, ncclFloat32, h, nullptr), bad);
  RESULT(ncclGather(x, x, 1, ncclFloat32, 0, h, nullptr), bad);
  RESULT(ncclScatter(x, x, 1, ncclFloat32, 0, h, nullptr), bad);
  RESULT(ncclSend(x, 1, ncclFloat32, 0, h, nullptr), bad);
  RESULT(ncclRecv(x, 1, ncclFloat32, 0, h, nullptr), bad);
  RESULT(synchronize(h), bad);
  RESULT(pyncclCpuStreamQuery(h, nullptr), bad);
  CHECK(!last_error().empty());
  CHECK(ncclGetLastError(h) != nullptr);
  CHECK_EQ(x[0], 0.0f);
}

void refused_as_stream(ncclComm_t comm, cudaEvent_t event, cudaStream_t h) {
  float x = 1;
  RESULT(pyncclCpuStreamDestroy(h), ncclInvalidArgument);
  RESULT(pyncclCpuStreamQuery(comm, h), ncclInvalidArgument);
  RESULT(synchronize(comm, h), ncclInvalidArgument);
  RESULT(pyncclCpuStreamWaitEvent(comm, h, event), ncclInvalidArgument);
  RESULT(pyncclCpuEventRecord(comm, event, h), ncclInvalidArgument);
  RESULT(sum(&x, 1, comm, h), ncclInvalidArgument);
  SAYS(last_error(), pointer(h));
}

void refused_as_event(cudaStream_t stream, cudaEvent_t h) {
  RESULT(pyncclCpuEventDestroy(h), ncclInvalidArgument);
  RESULT(pyncclCpuEventQuery(h), ncclInvalidArgument);
  RESULT(pyncclCpuEventSynchronize(h, 0), ncclInvalidArgument);
  RESULT(pyncclCpuEventRecord(nullptr, h, stream), ncclInvalidArgument);
  RESULT(pyncclCpuStreamWaitEvent(nullptr, stream, h), ncclInvalidArgument);
  SAYS(last_error(), pointer(h));
}

template <class To, class From>
To as(From handle) {
  return reinterpret_cast<To>(handle);
}

struct Kinds {
  ncclComm_t comm = alone();
  cudaStream_t stream;
  cudaEvent_t event;
  Kinds() {
    OK(pyncclCpuStreamCreate(&stream));
    OK(pyncclCpuEventCreate(&event));
  }
  void destroy() {
    OK(ncclCommDestroy(comm));
    OK(pyncclCpuStreamDestroy(stream));
    OK(pyncclCpuEventDestroy(event));
  }
};

TEST_CASE("invented handles are refused") {
  Kinds live;
  static char somewhere[64];
  uintptr_t invented[] = {3, 8, 0x1000, 0xdeadbeef, uintptr_t(somewhere), uintptr_t(-1), uintptr_t(-8)};
  for (uintptr_t h : invented) {
    refused_as_communicator(as<ncclComm_t>(h));
    refused_as_stream(live.comm, live.event, as<cudaStream_t>(h));
    refused_as_event(live.stream, as<cudaEvent_t>(h));
  }
  // Beside a live one.
  for (intptr_t step : {1, -1, 2, 4, 8, 16, 64, 4096}) {
    int n;
    RESULT(ncclCommCount(as<ncclComm_t>(intptr_t(live.comm) + step), &n), ncclInvalidArgument);
    RESULT(synchronize(nullptr, as<cudaStream_t>(intptr_t(live.stream) + step)), ncclInvalidArgument);
    RESULT(pyncclCpuEventQuery(as<cudaEvent_t>(intptr_t(live.event) + step)), ncclInvalidArgument);
  }
  live.destroy();
}

TEST_CASE("handles of another kind are refused") {
  Kinds live;
  refused_as_communicator(as<ncclComm_t>(live.stream));
  refused_as_communicator(as<ncclComm_t>(live.event));
  refused_as_stream(live.comm, live.event, as<cudaStream_t>(live.comm));
  refused_as_stream(live.comm, live.event, as<cudaStream_t>(live.event));
  refused_as_event(live.stream, as<cudaEvent_t>(live.comm));
  refused_as_event(live.stream, as<cudaEvent_t>(live.stream));
  live.destroy();
}

// Others take their places meanwhile.
TEST_CASE("stale handles are refused") {
  Kinds live, stale;
  stale.destroy();
  std::vector<Kinds> others(50);
  for (const Kinds& k : others)
    CHECK((k.comm != stale.comm && k.stream != stale.stream && k.event != stale.event));
  refused_as_communicator(stale.comm);
  refused_as_stream(live.comm, live.event, stale.stream);
  refused_as_event(live.stream, stale.event);
  for (Kinds& k : others) k.destroy();
  live.destroy();
}

// Registrations, windows and operators: stale, of another communicator, of the other kind.
TEST_CASE("stale registrations are refused") {
  ncclComm_t comm = alone(), other = alone();
  constexpr size_t kPage = NCCL_WIN_REQUIRED_ALIGNMENT;
  const ncclResult_t bad = ncclInvalidArgument;
  void *handle, *user, *memory;
  ncclWindow_t window;
  ncclRedOp_t op;
  float two = 2, x = 1;
  OK(ncclMemAlloc(&memory, 100 * kPage));
  char* page = static_cast<char*>(memory);
  OK(ncclCommRegister(comm, page, kPage, &handle));
  OK(ncclCommWindowRegister(comm, page, kPage, &window, 0));
  OK(ncclRedOpCreatePreMulSum(&op, &two, ncclFloat32, ncclScalarHostImmediate, comm));
  RESULT(ncclCommDeregister(other, handle), ncclInvalidUsage);
  RESULT(ncclCommDeregister(comm, window), ncclInvalidUsage);
  RESULT(ncclCommWindowDeregister(comm, as<ncclWindow_t>(handle)), bad);
  RESULT(ncclCommWindowDeregister(other, window), bad);
  RESULT(ncclWinGetUserPtr(other, window, &user), bad);
  RESULT(ncclRedOpDestroy(op, other), bad);
  RESULT(ncclAllReduce(&x, &x, 1, ncclFloat32, op, other, nullptr), bad);
  OK(ncclCommDeregister(comm, handle));
  OK(ncclCommWindowDeregister(comm, window));
  OK(ncclRedOpDestroy(op, comm));
  for (int i = 0; i < 100; ++i) {
    void* again;
    OK(ncclCommRegister(comm, page + size_t(i) * kPage, kPage, &again));
    CHECK(again != handle);
    CHECK(again != static_cast<void*>(window));
  }
  RESULT(ncclCommDeregister(comm, handle), ncclInvalidUsage);
  RESULT(ncclCommWindowDeregister(comm, window), bad);
  RESULT(ncclWinGetUserPtr(comm, window, &user), bad);
  RESULT(ncclRedOpDestroy(op, comm), bad);
  RESULT(ncclAllReduce(&x, &x, 1, ncclFloat32, op, comm, nullptr), bad);
  CHECK_EQ(x, 1.0f);
  OK(ncclCommDestroy(comm));
  OK(ncclCommDestroy(other));
  OK(ncclMemFree(memory));
}

}  // namespace

#define RACES(call)                                                           \
  TEST_CASE(#call " against abort") { race<Call::call, End::Abort>(); }       \
  TEST_CASE(#call " against destroy") { race<Call::call, End::Destroy>(); }   \
  TEST_CASE(#call " against finalize") { race<Call::call, End::Finalize>(); } \
  TEST_CASE(#call " against revoke") { race<Call::call, End::Revoke>(); }

RACES(AllReduce)
RACES(StreamSynchronize)
RACES(GetAsyncError)
RACES(CommCount)
RACES(GetLastError)
