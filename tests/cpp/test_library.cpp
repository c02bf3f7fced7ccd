// The CPU library as a C program uses it, with ranks as threads and as forked processes; built with the
// sanitizers in CI, so it touches every path on which threads or processes meet.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

#include "ranks.hpp"

using namespace testing;

namespace {

constexpr size_t kCounts[] = {0, 1, 17, 1023, 100003};

void wait(ncclComm_t comm, cudaStream_t stream = nullptr) {
  OK(pyncclCpuStreamSynchronize(comm, stream, -1));
}

struct World {
  int rank, nranks;
  ncclComm_t comm;
  std::vector<float> make(size_t count, float value) const { return std::vector<float>(count, value); }
};

void check_all(const std::vector<float>& got, float want) {
  size_t wrong = 0;
  for (float v : got) wrong += v != want;
  CHECK_EQ(wrong, size_t(0));
}

void all_collectives(const World& w) {
  int n = w.nranks;
  float sum = float(n * (n + 1)) / 2;
  for (size_t count : kCounts) {
    std::vector<float> in = w.make(count, float(w.rank + 1)), out = w.make(count, 0),
                       all = w.make(count * size_t(n), 0);
    OK(ncclAllReduce(in.data(), out.data(), count, ncclFloat32, ncclSum, w.comm, nullptr));
    wait(w.comm);
    check_all(out, sum);
    OK(ncclAllGather(in.data(), all.data(), count, ncclFloat32, w.comm, nullptr));
    wait(w.comm);
    for (int r = 0; r < n && count; ++r) CHECK_EQ(all[size_t(r) * count], float(r + 1));
    OK(ncclReduceScatter(all.data(), out.data(), count, ncclFloat32, ncclSum, w.comm, nullptr));
    wait(w.comm);
    check_all(out, float(n * (w.rank + 1)));
    OK(ncclBroadcast(in.data(), out.data(), count, ncclFloat32, n - 1, w.comm, nullptr));
    wait(w.comm);
    check_all(out, float(n));
    OK(ncclReduce(in.data(), out.data(), count, ncclFloat32, ncclMax, 0, w.comm, nullptr));
    OK(ncclAlltoAll(all.data(), std::vector<float>(all).data(), 0, ncclFloat32, w.comm, nullptr));
    OK(ncclGather(in.data(), all.data(), count, ncclFloat32, 0, w.comm, nullptr));
    OK(ncclScatter(all.data(), out.data(), count, ncclFloat32, 0, w.comm, nullptr));
    wait(w.comm);
    check_all(out, float(w.rank + 1));
  }
}

void point_to_point(const World& w) {
  int next = (w.rank + 1) % w.nranks, previous = (w.rank + w.nranks - 1) % w.nranks;
  for (size_t count : kCounts) {
    std::vector<float> out = w.make(count, float(w.rank)), in = w.make(count, -1);
    OK(ncclGroupStart());
    OK(ncclSend(out.data(), count, ncclFloat32, next, w.comm, nullptr));
    OK(ncclRecv(in.data(), count, ncclFloat32, previous, w.comm, nullptr));
    OK(ncclGroupEnd());
    wait(w.comm);
    check_all(in, float(previous));
  }
}

void two_streams_and_an_event(const World& w) {
  cudaStream_t a, b;
  cudaEvent_t event;
  OK(pyncclCpuStreamCreate(&a));
  OK(pyncclCpuStreamCreate(&b));
  OK(pyncclCpuEventCreate(&event));
  std::vector<float> x = w.make(50000, 1), y = w.make(50000, 0), z = w.make(50000, 0);
  OK(ncclAllReduce(x.data(), y.data(), x.size(), ncclFloat32, ncclSum, w.comm, a));
  OK(pyncclCpuEventRecord(w.comm, event, a));
  OK(pyncclCpuStreamWaitEvent(w.comm, b, event));
  OK(ncclAllReduce(y.data(), z.data(), y.size(), ncclFloat32, ncclSum, w.comm, b));
  OK(pyncclCpuEventSynchronize(event, -1));
  wait(w.comm, b);
  check_all(z, float(w.nranks * w.nranks));
  OK(pyncclCpuEventDestroy(event));
  OK(pyncclCpuStreamDestroy(a));
  OK(pyncclCpuStreamDestroy(b));
  CHECK_EQ(int(pyncclCpuStreamDestroy(b)), int(ncclInvalidArgument));
}

// Nobody runs what is on it but those who wait; destroyed with work on it, it has that done.
void a_stream_without_a_thread(const World& w) {
  cudaStream_t stream = nullptr, other;
  cudaEvent_t event;
  OK(pyncclCpuStreamCreate(&other));
  OK(pyncclCpuEventCreate(&event));
  CHECK_EQ(int(pyncclCpuStreamCreateWithFlags(&stream, 4)), int(ncclInvalidArgument));
  OK(pyncclCpuStreamCreateWithFlags(&stream, 3));
  std::vector<float> x = w.make(50000, 1), y = w.make(50000, 1), z = w.make(50000, 1);
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, w.comm, stream));
  usleep(20000);
  CHECK_EQ(int(pyncclCpuStreamQuery(w.comm, stream)), int(ncclInProgress));
  OK(pyncclCpuEventRecord(w.comm, event, stream));
  OK(pyncclCpuEventSynchronize(event, -1));
  check_all(x, float(w.nranks));
  OK(ncclAllReduce(y.data(), y.data(), y.size(), ncclFloat32, ncclSum, w.comm, stream));
  OK(pyncclCpuEventRecord(w.comm, event, stream));
  OK(pyncclCpuStreamWaitEvent(w.comm, other, event));
  wait(w.comm, other);
  check_all(y, float(w.nranks));
  OK(ncclAllReduce(z.data(), z.data(), z.size(), ncclFloat32, ncclSum, w.comm, stream));
  OK(pyncclCpuStreamDestroy(stream));
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, w.comm, other));
  wait(w.comm, other);
  check_all(z, float(w.nranks));
  OK(pyncclCpuEventDestroy(event));
  OK(pyncclCpuStreamDestroy(other));
}

void split_and_back(const World& w) {
  ncclComm_t half = nullptr;
  OK(ncclCommSplit(w.comm, w.rank % 2, -w.rank, &half, nullptr));
  int rank = -1, size = -1;
  OK(ncclCommUserRank(half, &rank));
  OK(ncclCommCount(half, &size));
  std::vector<float> x = w.make(5000, 1);
  OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, half, nullptr));
  wait(half);
  check_all(x, float(size));
  OK(ncclCommFinalize(half));
  OK(ncclCommDestroy(half));
}

void everything(World w) {
  all_collectives(w);
  point_to_point(w);
  two_streams_and_an_event(w);
  a_stream_without_a_thread(w);
  if (w.nranks > 1) split_and_back(w);
}

void one_rank(const ncclUniqueId& id, int nranks, int rank, const std::function<void(World)>& body) {
  World w{rank, nranks, nullptr};
  OK(ncclCommInitRank(&w.comm, nranks, id, rank));
  if (!w.comm) return;
  body(w);
  OK(ncclCommFinalize(w.comm));
  OK(ncclCommDestroy(w.comm));
  CHECK_EQ(int(ncclCommDestroy(w.comm)), int(ncclInvalidArgument));
}

void thread_ranks(int nranks, const std::function<void(World)>& body) {
  const ncclUniqueId id = new_id();
  as_threads(nranks, [&](int r) { one_rank(id, nranks, r, body); });
}

// This process makes the id and serves it; it is no rank itself.
void process_ranks(int nranks, const std::function<void(World)>& body) {
  const ncclUniqueId id = new_id();
  as_processes(nranks, [&](int r) { one_rank(id, nranks, r, body); });
}

TEST_CASE("threads of one process") {
  for (int n : {1, 2, 3}) thread_ranks(n, everything);
}
TEST_CASE("forked processes") {
  for (int n : {1, 2, 4}) process_ranks(n, everything);
}
TEST_CASE("forked processes through shared memory") {
  set("PYNCCL_CPU_DIRECT", "0");
  process_ranks(3, everything);
}
TEST_CASE("threads through shared memory") {
  set("PYNCCL_CPU_DIRECT", "0");
  thread_ranks(3, everything);
}
// Each rank on a host of its own.
void over_tcp(const std::function<void(World)>& body) {
  const ncclUniqueId id = new_id();
  as_processes(3, [&](int r) {
    set("NCCL_HOSTID", std::to_string(r).c_str());
    one_rank(id, 3, r, body);
  });
}

TEST_CASE("forked processes over tcp") { over_tcp(everything); }

TEST_CASE("two hosts of two processes") {
  const ncclUniqueId id = new_id();
  as_processes(4, [&](int r) {
    set("NCCL_HOSTID", std::to_string(r / 2).c_str());
    one_rank(id, 4, r, everything);
  });
}

// A message may exceed what a socket's pipe keeps of what has arrived.
TEST_CASE("the most that comes with a header over tcp") {
  set("PYNCCL_CPU_INLINE_BYTES", "1048576");
  set("PYNCCL_CPU_RING_BYTES", "4194304");
  over_tcp([](const World& w) {
    for (size_t count : {size_t(65536), size_t(250000)}) {
      std::vector<float> in = w.make(count, float(w.rank + 1)), out = w.make(count, 0);
      for (int i = 0; i < 5; ++i) {
        OK(ncclAllReduce(in.data(), out.data(), count, ncclFloat32, ncclSum, w.comm, nullptr));
        OK(ncclBroadcast(out.data(), out.data(), count, ncclFloat32, 1, w.comm, nullptr));
      }
      wait(w.comm);
      check_all(out, 6);
      OK(ncclGroupStart());
      OK(ncclSend(in.data(), count, ncclFloat32, (w.rank + 1) % 3, w.comm, nullptr));
      OK(ncclRecv(out.data(), count, ncclFloat32, (w.rank + 2) % 3, w.comm, nullptr));
      OK(ncclGroupEnd());
      wait(w.comm);
      check_all(out, float((w.rank + 2) % 3 + 1));
    }
  });
}

TEST_CASE("init all in one thread") {
  ncclComm_t comms[3];
  OK(ncclCommInitAll(comms, 3, nullptr));
  std::vector<std::vector<float>> x(3, std::vector<float>(20000, 2));
  OK(ncclGroupStart());
  for (int i = 0; i < 3; ++i)
    OK(ncclAllReduce(x[size_t(i)].data(), x[size_t(i)].data(), 20000, ncclFloat32, ncclSum, comms[i],
                     nullptr));
  OK(ncclGroupEnd());
  for (int i = 0; i < 3; ++i) wait(comms[i]);
  for (auto& v : x) check_all(v, 6);
  OK(ncclGroupStart());
  for (ncclComm_t c : comms) OK(ncclCommFinalize(c));
  OK(ncclGroupEnd());
  for (ncclComm_t c : comms) OK(ncclCommDestroy(c));
}

// Several communicators on one stream run as one.
TEST_CASE("a group over two communicators") {
  thread_ranks(2, [](World w) {
    ncclComm_t other;
    OK(ncclCommSplit(w.comm, 0, 0, &other, nullptr));
    std::vector<float> x = w.make(9000, 1), y = w.make(9000, 2);
    OK(ncclGroupStart());
    OK(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclSum, w.comm, nullptr));
    OK(ncclAllReduce(y.data(), y.data(), y.size(), ncclFloat32, ncclSum, other, nullptr));
    OK(ncclGroupEnd());
    wait(w.comm);
    check_all(x, 2);
    check_all(y, 4);
    OK(ncclCommDestroy(other));
  });
}

bool is_mismatch(ncclComm_t comm) {
  int kind = -1;
  OK(pyncclCpuGetErrorKind(comm, &kind));
  CHECK((kind == 0 || kind == 1));
  return kind == 1;
}

TEST_CASE("a mismatch reaches every rank") {
  const ncclUniqueId id = new_id();
  as_threads(3, [&](int r) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, 3, id, r));
    float x[8] = {}, y[8] = {};
    ncclResult_t called = ncclAllReduce(x, y, r == 1 ? 8 : 4, ncclFloat32, ncclSum, comm, nullptr);
    ncclResult_t waited = pyncclCpuStreamSynchronize(comm, nullptr, -1), async = ncclSuccess;
    OK(ncclCommGetAsyncError(comm, &async));
    CHECK((called == ncclInvalidUsage || waited == ncclInvalidUsage));
    CHECK_EQ(int(async), int(ncclInvalidUsage));
    CHECK(contains(ncclGetLastError(comm), "count 8"));
    CHECK(is_mismatch(comm));
    CHECK_EQ(int(ncclAllReduce(x, y, 4, ncclFloat32, ncclSum, comm, nullptr)), int(ncclInvalidUsage));
    CHECK(is_mismatch(nullptr));
    OK(ncclCommAbort(comm));
  });
}

TEST_CASE("an event has the result of the work before it") {
  const ncclUniqueId id = new_id();
  as_threads(2, [&](int r) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, 2, id, r));
    cudaStream_t stream;
    OK(pyncclCpuStreamCreate(&stream));
    cudaEvent_t before, after, of_any;
    for (cudaEvent_t* e : {&before, &after, &of_any}) OK(pyncclCpuEventCreate(e));
    float x[8] = {};
    OK(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, comm, stream));
    OK(pyncclCpuEventRecord(comm, before, stream));
    OK(ncclAllReduce(x, x, 4 + r, ncclFloat32, ncclSum, comm, stream));
    OK(pyncclCpuEventRecord(comm, after, stream));
    OK(pyncclCpuEventRecord(nullptr, of_any, stream));
    CHECK_EQ(int(pyncclCpuEventSynchronize(after, -1)), int(ncclInvalidUsage));
    // Also after a wait has returned the error.
    CHECK_EQ(int(pyncclCpuStreamSynchronize(comm, stream, -1)), int(ncclInvalidUsage));
    OK(pyncclCpuEventQuery(before));
    CHECK_EQ(int(pyncclCpuEventQuery(after)), int(ncclInvalidUsage));
    CHECK_EQ(int(pyncclCpuEventQuery(of_any)), int(ncclInvalidUsage));
    // A stream that waits for it relies on the work.
    cudaStream_t behind;
    OK(pyncclCpuStreamCreate(&behind));
    OK(pyncclCpuStreamWaitEvent(nullptr, behind, of_any));
    CHECK_EQ(int(pyncclCpuStreamSynchronize(nullptr, behind, -1)), int(ncclInvalidUsage));
    OK(pyncclCpuStreamDestroy(behind));
    OK(pyncclCpuEventRecord(comm, before, stream));
    CHECK_EQ(int(pyncclCpuEventSynchronize(before, -1)), int(ncclInvalidUsage));
    for (cudaEvent_t e : {before, after, of_any}) OK(pyncclCpuEventDestroy(e));
    OK(pyncclCpuStreamDestroy(stream));
    OK(ncclCommAbort(comm));
  });
}

TEST_CASE("an event writes to an eventfd") {
  thread_ranks(2, [](World w) {
    const int mine = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), unused = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    auto told = [](int fd, int ms) {
      pollfd p = {fd, POLLIN, 0};
      uint64_t value = 0;
      return poll(&p, 1, ms) == 1 && read(fd, &value, sizeof value) == sizeof value && value == 1;
    };
    cudaEvent_t event;
    OK(pyncclCpuEventCreate(&event));
    OK(pyncclCpuEventNotify(event, mine));  // never recorded: it has happened
    CHECK(told(mine, 0));
    float x = 1;
    OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, w.comm, nullptr));
    OK(pyncclCpuEventRecord(w.comm, event, nullptr));
    OK(pyncclCpuEventNotify(event, unused));
    OK(pyncclCpuEventNotify(event, mine));
    CHECK(told(mine, 20000));
    OK(pyncclCpuEventQuery(event));
    CHECK(!told(mine, 0));
    const int blocks = eventfd(0, EFD_CLOEXEC);
    for (int bad : {-1, 1 << 30, blocks})
      CHECK_EQ(int(pyncclCpuEventNotify(event, bad)), int(ncclInvalidArgument));
    for (int fd : {mine, unused, blocks}) close(fd);
    OK(pyncclCpuEventDestroy(event));
  });
}

TEST_CASE("a report of a mismatch says once whose it is") {
  const ncclUniqueId id = new_id();
  as_threads(3, [&](int r) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, 3, id, r));
    float x[8] = {};
    if (r == 0) OK(ncclSend(x, 8, ncclFloat32, 1, comm, nullptr));
    if (r == 1) OK(ncclRecv(x, 4, ncclFloat32, 0, comm, nullptr));
    if (r == 2) OK(ncclRecv(x, 4, ncclFloat32, 0, comm, nullptr));
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess) {
      pyncclCpuStreamSynchronize(comm, nullptr, 20);
      OK(ncclCommGetAsyncError(comm, &state));
    }
    CHECK_EQ(int(state), int(ncclInvalidUsage));
    CHECK(is_mismatch(comm));
    const std::string text = ncclGetLastError(comm);
    const size_t report = text.find(" reports: ");
    CHECK_EQ(report == std::string::npos, r == 1);
    int reported = -1;
    OK(pyncclCpuIsErrorReported(comm, &reported));
    CHECK_EQ(reported, int(r != 1));
    CHECK_MESSAGE(text.find(" reports: ", report + 1) == std::string::npos, text);
    OK(ncclCommAbort(comm));
  });
}

TEST_CASE("the words of a mismatch make none") {
  ncclParamHandle_t handle;
  CHECK_EQ(int(ncclParamBind(&handle, "the ranks called different things: ")), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "the ranks called different things: "));
  CHECK(!is_mismatch(nullptr));
}

// What a text of the last error begins with, by its fields.
std::pair<std::string, std::string> prefix_of(ncclComm_t comm) {
  int function = -1, place = -1;
  const std::string text = ncclGetLastError(comm);
  OK(pyncclCpuGetErrorPrefix(comm, &function, &place));
  return {text.substr(0, size_t(function)), text.substr(0, size_t(place))};
}

TEST_CASE("an error tells what its text begins with") {
  using Prefix = std::pair<std::string, std::string>;
  const ncclUniqueId id = new_id();
  as_threads(2, [&](int r) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, 2, id, r));
    float x[4] = {};
    CHECK_EQ(int(ncclSend(x, 4, ncclFloat32, 7, comm, nullptr)), int(ncclInvalidArgument));
    CHECK((prefix_of(nullptr) == Prefix{"ncclSend: ", ""}));
    // In a group the end of the group returns it.
    OK(ncclGroupStart());
    ncclSend(x, 4, ncclFloat32, 7, comm, nullptr);
    CHECK_EQ(int(ncclGroupEnd()), int(ncclInvalidArgument));
    CHECK((prefix_of(nullptr) == Prefix{"ncclSend: ", ""}));
    ncclAllReduce(x, x, r == 1 ? 3 : 4, ncclFloat32, ncclSum, comm, nullptr);
    pyncclCpuStreamSynchronize(comm, nullptr, -1);
    const std::string place = "rank " + std::to_string(r) + " of 2: ";
    CHECK((prefix_of(comm) == Prefix{"", place}));
    OK(ncclCommAbort(comm));
  });
  ncclParamHandle_t handle;
  CHECK_EQ(int(ncclParamBind(&handle, "rank 0 of 2: ")), int(ncclInvalidArgument));
  CHECK((prefix_of(nullptr) == Prefix{"ncclParamBind: ", ""}));
}

TEST_CASE("a killed rank is named") {
  const ncclUniqueId id = new_id();
  auto body = [&](int r) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, 3, id, r));
    std::vector<float> x(300000, 1);
    ncclResult_t result = ncclSuccess;
    for (int i = 0; result == ncclSuccess; ++i) {
      if (r == 1 && i == 20) kill(getpid(), SIGKILL);
      result = ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat32, ncclMax, comm, nullptr);
      if (result == ncclSuccess) result = pyncclCpuStreamSynchronize(comm, nullptr, -1);
    }
    CHECK_EQ(int(result), int(ncclRemoteError));
    CHECK(contains(ncclGetLastError(comm), "rank 1 (pid"));
    int gone = -1;
    OK(pyncclCpuIsGone(comm, r, &gone));
    CHECK_EQ(gone, 0);
    for (int tries = 0; !gone && tries < 1000; ++tries) {
      usleep(10000);
      OK(pyncclCpuIsGone(comm, 1, &gone));
    }
    CHECK_EQ(gone, 2);
    CHECK_EQ(int(pyncclCpuIsGone(comm, 3, &gone)), int(ncclInvalidArgument));
    OK(ncclCommAbort(comm));
  };
  as_processes_with(1, 3, body);
}

TEST_CASE("an abort ends what waits") {
  thread_ranks(1, [](World) {});
  const ncclUniqueId id = new_id();
  std::atomic<bool> waits{false};
  std::thread other([&] {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, 2, id, 1));
    while (!waits) usleep(1000);
    usleep(300000);
    OK(ncclCommAbort(comm));
  });
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, 2, id, 0));
  float x = 1;
  OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, nullptr));
  CHECK_EQ(int(pyncclCpuStreamSynchronize(comm, nullptr, 500)), int(ncclInProgress));
  int awaited[2] = {-1, -1};
  for (int r : {0, 1}) OK(pyncclCpuIsAwaited(comm, r, &awaited[r]));
  CHECK(awaited[0] == 0);
  CHECK(awaited[1] == 1);
  CHECK_EQ(int(pyncclCpuIsAwaited(comm, 2, &awaited[0])), int(ncclInvalidArgument));
  waits = true;
  CHECK_EQ(int(pyncclCpuStreamSynchronize(comm, nullptr, -1)), int(ncclRemoteError));
  OK(ncclCommAbort(comm));
  other.join();
}

TEST_CASE("a communicator stays with its process") {
  thread_ranks(1, [](World w) {
    CHECK_EQ(
        in_child([&] {
          int n;
          CHECK_EQ(int(ncclCommCount(w.comm, &n)), int(ncclInvalidArgument));
          _exit(failures == 0 ? 0 : 1);  // no leak report: the parent's threads are not here to own anything
        }),
        0);
  });
}

}  // namespace
