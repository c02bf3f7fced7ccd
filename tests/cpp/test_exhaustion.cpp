// What a process has may run out: memory, threads, descriptors. Every exported function then answers with an
// error that says what, and the process goes on.
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>

#include "failing.hpp"
#include "ranks.hpp"

using namespace testing;
using failing::TestCode;

// Each of the many processes would wait a second at its exit for races to be seen.
extern "C" const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

namespace {

// ---- limits of the process ----

class Limit {
 public:
  Limit(decltype(RLIMIT_AS) what, rlim_t soft) : what_(what) {
    getrlimit(what_, &before_);
    rlimit lower = before_;
    lower.rlim_cur = soft;
    CHECK_EQ(setrlimit(what_, &lower), 0);
  }
  ~Limit() { setrlimit(what_, &before_); }

 private:
  decltype(RLIMIT_AS) what_;
  rlimit before_;
};

bool says_one_of(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (contains(text, part)) return true;
  fprintf(stderr, "\"%s\" does not name what ran out\n", text.c_str());
  return false;
}

void the_process_goes_on() {
  std::vector<ncclComm_t> comms = together(2);
  float x[2] = {1, 2};
  for (size_t r = 0; r < 2; ++r) OK(sum(&x[r], 1, comms[r]));
  for (size_t r = 0; r < 2; ++r) OK(synchronize(comms[r], nullptr, 20000));
  CHECK_EQ(x[0], 3.0f);
  CHECK_EQ(x[1], 3.0f);
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

// Some 2,000 bytes of bookkeeping a rank are 16 GB. A bound on the ranks is an answer as good as a lack of
// memory.
bool names_ranks_or_memory(const std::string& text) {
  return says_one_of(text, {"memory", "more than", "at most"}) &&
         says_one_of(text, {"8000000", "bytes", "GiB", "MiB"});
}

TEST_CASE("more ranks than memory") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "5");
  OK(ncclCommDestroy(alone()));
  for (int rank : {0, 7999999}) {
    ncclComm_t comm = nullptr;
    ncclUniqueId id = new_id();
    ncclResult_t r;
    std::string text;
    {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
      failing::allowance = 256l << 20;  // the sanitizers reserve address space without end
      r = ncclCommInitRank(&comm, 8000000, id, rank);
      failing::allowance = -1;
#else
      Limit memory(RLIMIT_AS, rlim_t(4) << 30);
      r = ncclCommInitRank(&comm, 8000000, id, rank);
#endif
      text = last_error();
    }
    RESULT(r, ncclSystemError);
    CHECK(names_ranks_or_memory(text));
    CHECK(comm == nullptr);
    the_process_goes_on();
  }
}

// The same as a child of a communicator that exists.
TEST_CASE("grown beyond memory") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "5");
  ncclComm_t comm = alone(), grown = nullptr;
  ncclUniqueId id;
  OK(ncclCommGetUniqueId(comm, &id));
  ncclResult_t r;
  {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    failing::allowance = 256l << 20;
    r = ncclCommGrow(comm, 8000000, &id, -1, &grown, nullptr);
    failing::allowance = -1;
#else
    Limit memory(RLIMIT_AS, rlim_t(4) << 30);
    r = ncclCommGrow(comm, 8000000, &id, -1, &grown, nullptr);
#endif
  }
  RESULT(r, ncclSystemError);
  CHECK(names_ranks_or_memory(last_error()));
  float x = 1;
  OK(sum(&x, 1, comm));
  OK(synchronize(comm, nullptr, 20000));
  OK(ncclCommDestroy(comm));
  the_process_goes_on();
}

// Root may have as many threads as it likes, so the test becomes somebody who may not.
void become_a_user() {
  if (geteuid() != 0) return;
  CHECK_EQ(setresuid(65534, 65534, 65534), 0);
  prctl(PR_SET_DUMPABLE, 1);
}

void expect_no_thread(ncclResult_t r) {
  RESULT(r, ncclSystemError);
  CHECK(says_one_of(last_error(), {"thread"}));
}

TEST_CASE("no thread for the service") {
  become_a_user();
  ncclUniqueId id;
  {
    Limit threads(RLIMIT_NPROC, 1);
    expect_no_thread(ncclGetUniqueId(&id));
    expect_no_thread(ncclGetUniqueId(&id));
  }
  the_process_goes_on();
}

// Work may wait for a thread of its own, or be run by who synchronizes; what may not be is a crash.
TEST_CASE("no thread for a stream") {
  become_a_user();
  ncclComm_t comm = alone();
  cudaStream_t stream;
  OK(pyncclCpuStreamCreate(&stream));
  float x = 1;
  {
    Limit threads(RLIMIT_NPROC, 1);
    for (cudaStream_t s : {cudaStream_t(nullptr), stream}) {
      ncclResult_t r = sum(&x, 1, comm, s);
      if (r != ncclSuccess)
        expect_no_thread(r);
      else
        OK(synchronize(comm, s, 20000));
    }
    ncclComm_t comms[2] = {};
    if (ncclResult_t r = ncclCommInitAll(comms, 2, nullptr); r != ncclSuccess) {
      expect_no_thread(r);
      CHECK((comms[0] == nullptr && comms[1] == nullptr));
    } else {
      for (ncclComm_t c : comms) OK(ncclCommDestroy(c));
    }
    OK(pyncclCpuStreamDestroy(stream));
  }
  OK(sum(&x, 1, comm));
  OK(synchronize(comm, nullptr, 20000));
  OK(ncclCommDestroy(comm));
  the_process_goes_on();
}

// The limit under which so many numbers are free.
rlim_t limit_for_spare(int spare) {
  std::vector<int> used;
  for (auto& file : open_files()) used.push_back(file.first);
  int limit = 0;
  for (int free = 0; free < spare || std::count(used.begin(), used.end(), limit); ++limit)
    free += std::count(used.begin(), used.end(), limit) == 0;
  return rlim_t(limit);
}

bool names_descriptors(const std::string& text) {
  return says_one_of(text, {"descriptor", "RLIMIT_NOFILE", "ulimit -n", "open files"});
}

// From none that is free to all that a communicator needs.
TEST_CASE("few descriptors") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "5");
  for (int spare = 0; spare < 20; ++spare) {
    auto with_few = [&] {
      alarm(60);
      at_step("%d descriptors to spare", spare);
      ncclComm_t comms[2] = {};
      ncclResult_t r;
      std::string text;
      {
        Limit files(RLIMIT_NOFILE, limit_for_spare(spare));
        r = ncclCommInitAll(comms, 2, nullptr);
        text = last_error();
      }
      if (r != ncclSuccess) {
        RESULT(r, ncclSystemError);
        CHECK(names_descriptors(text));
        CHECK((comms[0] == nullptr && comms[1] == nullptr));
      }
      for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
      the_process_goes_on();
    };
    if (int status = in_child(with_few); status != 0) {
      FAIL_CHECK(formatted("with %d descriptors to spare: %s %d", spare, status < 0 ? "signal" : "status",
                           abs(status)));
    }
  }
}

// A communicator that is there works on without a free descriptor, but for what needs one.
TEST_CASE("no descriptor left") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "5");
  std::vector<ncclComm_t> comms = together(2);
  float first[2] = {1, 2};
  for (size_t r = 0; r < 2; ++r) OK(sum(&first[r], 1, comms[r]));
  for (size_t r = 0; r < 2; ++r) OK(synchronize(comms[r], nullptr, 20000));
  Has before = process_has();
  {
    Limit files(RLIMIT_NOFILE, limit_for_spare(0));
    float x[2] = {1, 2};
    for (size_t r = 0; r < 2; ++r) OK(sum(&x[r], 1, comms[r]));
    for (size_t r = 0; r < 2; ++r) OK(synchronize(comms[r], nullptr, 20000));
    CHECK_EQ(x[0], 3.0f);
    // Of two ranks one may hear of it from the other; neither may take the other for dead.
    std::atomic<int> made{0}, named{0};
    as_threads(2, [&](int r) {
      ncclComm_t half = nullptr;
      if (ncclCommSplit(comms[size_t(r)], 0, 0, &half, nullptr) == ncclSuccess) {
        ++made;
        return void(OK(ncclCommAbort(half)));
      }
      std::string text = last_error();
      named += names_descriptors(text);
      if (contains(text, "died")) FAIL_CHECK(formatted("rank %d: %s", r, text.c_str()));
    });
    CHECK((made == 2 || named > 0));
  }
  CHECK(settles_to(before));
  for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
  the_process_goes_on();
}

// ---- the k-th failure ----

constexpr size_t kLarge = 100000;

// One of two ranks, which stops at its first error. Nothing that it does itself can fail.
struct Rank {
  int rank;
  std::array<float, 10> small;
  std::vector<float> large = std::vector<float>(kLarge), other = std::vector<float>(kLarge);
  std::atomic<int> thread{0};
  ncclComm_t comm = nullptr, half = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  ncclResult_t error = ncclSuccess;
  char text[512] = "", call[64] = "";

  bool did(ncclResult_t r, const char* name) {
    if (r == ncclSuccess || error != ncclSuccess) return r == ncclSuccess;
    error = r;
    snprintf(text, sizeof text, "%s", ncclGetLastError(nullptr));
    snprintf(call, sizeof call, "%.60s", name);
    return false;
  }
  bool summed(float* x, size_t count, ncclComm_t on, cudaStream_t s, float want);
  bool exchanged();
  bool streamed();
  bool registered();
  bool halved();
  bool run(const ncclUniqueId& id);
  void clean_up();
};

#define DO(call) \
  if (!did(LIBRARY(call), #call)) return false

bool Rank::summed(float* x, size_t count, ncclComm_t on, cudaStream_t s, float want) {
  std::fill_n(x, count, float(rank + 1));
  DO(sum(x, count, on, s));
  DO(synchronize(on, s, 20000));
  CHECK_EQ(x[0], want);
  CHECK_EQ(x[count - 1], want);
  return true;
}

bool Rank::exchanged() {
  std::fill_n(large.data(), kLarge, float(rank));
  DO(ncclGroupStart());
  ncclResult_t sent = LIBRARY(ncclSend(large.data(), kLarge, ncclFloat32, 1 - rank, comm, nullptr));
  bool ok = did(sent, "ncclSend");
  ncclResult_t got = LIBRARY(ncclRecv(other.data(), kLarge, ncclFloat32, 1 - rank, comm, nullptr));
  ok = did(got, "ncclRecv") && ok;
  ncclResult_t ended = LIBRARY(ncclGroupEnd());
  CHECK((ok || ended != ncclSuccess));  // a group whose call failed fails
  if (!did(ended, "ncclGroupEnd")) return false;
  DO(synchronize(comm, nullptr, 20000));
  CHECK_EQ(other.back(), float(1 - rank));
  return true;
}

bool Rank::streamed() {
  DO(pyncclCpuStreamCreate(&stream));
  DO(pyncclCpuEventCreate(&event));
  DO(pyncclCpuEventRecord(comm, event, nullptr));
  DO(pyncclCpuStreamWaitEvent(comm, stream, event));
  if (!summed(small.data(), small.size(), comm, stream, 3)) return false;
  DO(pyncclCpuEventSynchronize(event, 20000));
  return true;
}

bool Rank::registered() {
  void *memory = nullptr, *handle = nullptr;
  ncclRedOp_t op;
  DO(ncclMemAlloc(&memory, 10000));
  bool ok = did(LIBRARY(ncclCommRegister(comm, memory, 10000, &handle)), "ncclCommRegister");
  if (ok) ok = did(LIBRARY(ncclCommDeregister(comm, handle)), "ncclCommDeregister");
  DO(ncclMemFree(memory));
  if (!ok) return false;
  DO(ncclRedOpCreatePreMulSum(&op, small.data(), ncclFloat32, ncclScalarHostImmediate, comm));
  DO(ncclRedOpDestroy(op, comm));
  return true;
}

bool Rank::halved() {
  DO(ncclCommSplit(comm, 0, rank, &half, nullptr));
  if (!summed(small.data(), small.size(), half, nullptr, 3)) return false;
  DO(ncclCommDestroy(half));
  half = nullptr;
  return true;
}

bool Rank::run(const ncclUniqueId& id) {
  DO(ncclCommInitRank(&comm, 2, id, rank));
  if (!summed(small.data(), small.size(), comm, nullptr, 3)) return false;
  if (!summed(large.data(), large.size(), comm, nullptr, 3)) return false;
  if (!exchanged() || !streamed() || !registered() || !halved()) return false;
  DO(ncclCommFinalize(comm));
  return true;
}

// An end that failed has ended all the same, or can be repeated.
template <class End, class Handle>
void end(End call, Handle& handle) {
  if (!handle) return;
  ncclResult_t r = LIBRARY(call(handle));
  for (int again = 0; r == ncclSystemError && again < 100; ++again) {
    CHECK(*ncclGetLastError(nullptr) != '\0');
    r = LIBRARY(call(handle));
  }
  CHECK((r == ncclSuccess || r == ncclInvalidArgument));
  handle = nullptr;
}

void Rank::clean_up() {
  for (ncclComm_t* c : {&half, &comm}) error ? end(ncclCommAbort, *c) : end(ncclCommDestroy, *c);
  end(pyncclCpuStreamDestroy, stream);
  end(pyncclCpuEventDestroy, event);
}

// The error that a rank met is one that a lack of something, or the other rank's end, explains.
bool explained(const Rank& rank) {
  if (rank.error == ncclSuccess) return true;
  bool expected = rank.error == ncclSystemError || rank.error == ncclRemoteError ||
                  rank.error == ncclTimeout || contains(rank.text, "abort") ||
                  contains(rank.text, "out of memory");
  if (expected && rank.text[0]) return true;
  fprintf(stderr, "%s; rank %d: %s is %s: %s\n", current_step, rank.rank, rank.call, name_of(rank.error),
          rank.text);
  return false;
}

bool got_id(ncclUniqueId* id) {
  ncclResult_t r = LIBRARY(ncclGetUniqueId(id));
  if (r == ncclSuccess) return true;
  RESULT(r, ncclSystemError);
  CHECK(*ncclGetLastError(nullptr) != '\0');
  return false;
}

// Whoever cannot create its communicator lets the other know, which would wait for it.
bool two_threads() {
  TestCode here;
  ncclUniqueId id;
  if (!got_id(&id)) return false;
  Rank ranks[2];
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) ranks[r].rank = r;
  for (Rank& rank : ranks)
    threads.emplace_back([&] {
      TestCode mine;
      Rank& peer = ranks[1 - rank.rank];
      rank.thread = int(syscall(SYS_gettid));
      rank.run(id);
      if (!rank.comm && soon(20, [&] { return peer.thread != 0; })) pyncclCpuInterrupt(peer.thread, 1);
      rank.clean_up();
    });
  for (std::thread& t : threads) t.join();
  for (Rank& rank : ranks) pyncclCpuInterrupt(rank.thread, 0);
  for (Rank& rank : ranks) CHECK(explained(rank));
  return ranks[0].error == ncclSuccess && ranks[1].error == ncclSuccess;
}

// Rank 1 is a child in which nothing fails.
[[noreturn]] void be_rank_1(int id_from, bool own_host) {
  failing::disarm();
  TestCode here;
  if (own_host) set("NCCL_HOSTID", "1");
  alarm(30);
  failures = 0;
  ncclUniqueId id;
  if (read(id_from, &id, sizeof id) != ssize_t(sizeof id)) _exit(0);
  Rank rank;
  rank.rank = 1;
  rank.run(id);
  rank.clean_up();
  CHECK(explained(rank));
  _exit(failures == 0 ? 0 : 1);
}

bool two_processes(bool own_hosts) {
  TestCode here;
  if (own_hosts) set("NCCL_HOSTID", "0");
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  // The sanitizers' allocators do not survive a fork while another thread allocates (Gate in helpers.hpp):
  // the service's thread has done its work after a moment.
  if (kSanitized) usleep(20000);
  pid_t peer = fork();
  if (peer == 0) {
    close(ids[1]);
    be_rank_1(ids[0], own_hosts);
  }
  close(ids[0]);
  ncclUniqueId id;
  Rank rank;
  rank.rank = 0;
  bool ok = got_id(&id);
  if (ok) CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
  close(ids[1]);
  if (ok) ok = rank.run(id);
  if (!rank.comm) kill(peer, SIGKILL);
  bool created = rank.comm != nullptr;
  rank.clean_up();
  int status = reap(peer, 35);
  if (created || status != -SIGKILL) CHECK_EQ(status, 0);
  CHECK(explained(rank));
  return ok;
}

bool threads() { return two_threads(); }
bool processes() { return two_processes(false); }
bool hosts() { return two_processes(true); }
using Scenario = bool (*)();

// Fails the k-th place, or `several` from it on, then every `stride`-th after it, until a run has no such
// place. The number of places.
long fail_each(failing::Kind kind, long stride, Scenario scenario, long several = 1) {
  for (int i = 0; i < 3; ++i) CHECK(scenario());  // the service runs, every table has its first size
  Has before = process_has();
  for (long k = 0;; k += stride) {
    at_step("%s fails at place %ld, %ld times", failing::kNames[kind], k, several);
    failing::arm(kind, k, several);
    bool ok = scenario();
    failing::disarm();
    CHECK((ok || failing::fired));
    bool settled = settles_to(before);
    if (!settled)
      fprintf(stderr, "%s: %zu descriptors and %ld threads are left of %ld and %ld\n", current_step,
              open_files().size(), process_status("Threads"), before.files, before.threads);
    CHECK(settled);
    if (!failing::fired) return k;
    if (failures) return -1;
  }
}

// In a process for each place, so that the first call of all can fail, too. The process must then be as good
// as new.
long fail_each_at_first(failing::Kind kind, long stride, Scenario scenario) {
  for (long k = 0;; k += stride) {
    int status = in_child([&] {
      alarm(60);
      at_step("%s fails at place %ld of a new process", failing::kNames[kind], k);
      failing::arm(kind, k);
      bool ok = scenario();
      failing::disarm();
      CHECK((ok || failing::fired));
      if (!scenario()) FAIL_CHECK(formatted("%s: nothing succeeds after it", current_step));
      int result = failures ? 1 : failing::fired ? 77 : 0;
      fflush(nullptr);
      _exit(result);
    });
    if (status == 0) return k;
    if (status == 77) continue;
    FAIL_CHECK(formatted("%s fails at place %ld of a new process: %s %d", failing::kNames[kind], k,
                         status < 0 ? "signal" : "status", abs(status)));
    return -1;
  }
}

template <failing::Kind kind>
void failing_at_each_place() {
  set("PYNCCL_CPU_INIT_TIMEOUT", "2");
  bool often = kind == failing::kNew;
  long places = 0;
  const std::pair<const char*, Scenario> scenarios[] = {
      {"threads", threads}, {"processes", processes}, {"hosts", hosts}};
  for (auto& [name, scenario] : scenarios) {
    long found = fail_each_at_first(kind, often ? scaled(11, 13, 61) : 1, scenario);
    printf("     %ld places where %s can fail, of %s\n", found, failing::kNames[kind], name);
    places += found;
    if (failures) return;
  }
  long found = fail_each(kind, often ? scaled(1, 3, 11) : 1, threads);
  printf("     %ld places where %s can fail later on\n", found, failing::kNames[kind]);
  // Those who handle a failure meet the next one.
  for (long several : {2, 5, 30}) {
    found = fail_each(kind, often ? scaled(7, 13, 41) : 1, threads, several);
    printf("     %ld places where %s can fail %ld times\n", found, failing::kNames[kind], several);
  }
  CHECK(places > 0);
}

TEST_CASE("failing operator new") { failing_at_each_place<failing::kNew>(); }
TEST_CASE("failing pthread_create") { failing_at_each_place<failing::kThread>(); }
TEST_CASE("failing mmap") { failing_at_each_place<failing::kMap>(); }
TEST_CASE("failing socket") { failing_at_each_place<failing::kSocket>(); }
TEST_CASE("failing accept") { failing_at_each_place<failing::kAccept>(); }
TEST_CASE("failing eventfd") { failing_at_each_place<failing::kEventfd>(); }
TEST_CASE("failing epoll_create1") { failing_at_each_place<failing::kEpoll>(); }
TEST_CASE("failing memfd_create") { failing_at_each_place<failing::kMemfd>(); }

}  // namespace
