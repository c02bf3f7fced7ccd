// Forks of a process whose threads are all inside the library: what a child may not use of its parent's, what
// it can make of its own, and what it must not keep open.
#include <sys/stat.h>

#include <algorithm>

#include "ranks.hpp"

using namespace testing;

namespace {

constexpr int kPairs = 2;

// A child of GCC 12's AddressSanitizer finds the locks of its allocator as other threads held them, one of
// its ThreadSanitizer the threads that were about to begin or end. With them, threads of the parent stand
// still at a fork; without, nothing is made easy for the library.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCallersPause = true;
#else
constexpr bool kCallersPause = false;
#endif
constexpr bool kMakersPause = kSanitized;

class Pause {
 public:
  // Whoever wants to fork: until `threads` stand still.
  void begin(int threads) {
    wanted_ = true;
    CHECK(soon(60, [&] { return standing_ == threads; }));
  }
  void end() {
    wanted_ = false;
    CHECK(soon(60, [&] { return standing_ == 0; }));
  }
  bool wanted() const { return wanted_; }
  void stand_still() {
    ++standing_;
    while (wanted_) usleep(200);
    --standing_;
  }

 private:
  std::atomic<bool> wanted_{false};
  std::atomic<int> standing_{0};
};

// Two communicators of two ranks; each of the four ranks is a thread that calls without pause until all are
// told to stop, which the ranks of a communicator agree on in their calls.
class BusyParent {
 public:
  BusyParent() {
    OK(pyncclCpuStreamCreate(&stream));
    OK(pyncclCpuEventCreate(&event));
    for (int p = 0; p < kPairs; ++p) {
      ncclUniqueId id = new_id();
      for (int rank = 0; rank < 2; ++rank)
        threads_.emplace_back([this, id, p, rank] {
          OK(ncclCommInitRank(&comms[size_t(2 * p + rank)], 2, id, rank));
          work(comms[size_t(2 * p + rank)]);
        });
    }
    CHECK(soon(60, [&] { return rounds_ > 100; }));
  }
  pid_t fork_now(Pause* maker = nullptr) {
    if (kCallersPause) pause_.begin(2 * kPairs);
    if (maker && kMakersPause) maker->begin(1);
    pid_t pid = fork();
    if (pid == 0) return 0;
    if (kCallersPause) pause_.end();
    if (maker && kMakersPause) maker->end();
    return pid;
  }
  ~BusyParent() {
    stop_ = true;
    for (std::thread& t : threads_) t.join();
    for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
    OK(pyncclCpuStreamDestroy(stream));
    OK(pyncclCpuEventDestroy(event));
  }
  std::vector<ncclComm_t> comms = std::vector<ncclComm_t>(2 * kPairs);
  cudaStream_t stream;
  cudaEvent_t event;

 private:
  void work(ncclComm_t comm) {
    cudaStream_t mine;
    cudaEvent_t recorded;
    OK(pyncclCpuStreamCreate(&mine));
    OK(pyncclCpuEventCreate(&recorded));
    for (int i = 0;; ++i, ++rounds_) {
      float x[300] = {1, stop_ ? 1.0f : 0.0f, pause_.wanted() ? 1.0f : 0.0f};
      cudaStream_t on = i % 4 ? nullptr : mine;
      OK(sum(x, 300, comm, on));
      OK(pyncclCpuEventRecord(comm, recorded, on));
      if (i % 4) OK(pyncclCpuStreamWaitEvent(comm, mine, recorded));
      void *memory, *handle;
      OK(ncclMemAlloc(&memory, 5000));
      OK(ncclCommRegister(comm, memory, 5000, &handle));
      if (!OK(synchronize(comm, on, 60000))) break;
      CHECK_EQ(x[0], 2.0f);
      OK(pyncclCpuEventSynchronize(recorded, 60000));
      OK(ncclCommDeregister(comm, handle));
      OK(ncclMemFree(memory));
      if (x[1] > 0) break;
      if (x[2] > 0) pause_.stand_still();
    }
    OK(pyncclCpuStreamDestroy(mine));
    OK(pyncclCpuEventDestroy(recorded));
  }
  Pause pause_;
  std::atomic<bool> stop_{false};
  std::atomic<long> rounds_{0};
  std::vector<std::thread> threads_;
};

// ---- what a child does ----

void names_the_fork(const char* what) {
  std::string text = last_error();
  if (contains(text, "fork") || contains(text, "parent")) return;
  FAIL_CHECK(formatted("%s: \"%s\" says nothing of the fork", what, text.c_str()));
}
#define REFUSED(call)                  \
  do {                                 \
    RESULT(call, ncclInvalidArgument); \
    names_the_fork(#call);             \
  } while (0)

void inherited_handles_are_refused(const BusyParent& parent) {
  int n;
  float x = 1;
  ncclResult_t async;
  ncclComm_t made = nullptr, comm = parent.comms[0];
  at_step("child: inherited communicator");
  REFUSED(ncclCommCount(comm, &n));
  REFUSED(ncclCommGetAsyncError(comm, &async));
  REFUSED(sum(&x, 1, comm));
  REFUSED(synchronize(comm));
  REFUSED(ncclCommSplit(comm, 0, 0, &made, nullptr));
  REFUSED(ncclCommFinalize(comm));
  REFUSED(ncclCommDestroy(comm));
  REFUSED(ncclCommAbort(comm));
  CHECK(ncclGetLastError(comm) != nullptr);
  at_step("child: inherited stream");
  REFUSED(synchronize(nullptr, parent.stream));
  REFUSED(pyncclCpuStreamQuery(nullptr, parent.stream));
  REFUSED(pyncclCpuStreamDestroy(parent.stream));
  at_step("child: inherited event");
  REFUSED(pyncclCpuEventQuery(parent.event));
  REFUSED(pyncclCpuEventSynchronize(parent.event, 0));
  REFUSED(pyncclCpuEventDestroy(parent.event));
}

bool is_library_kind(const std::string& target) {
  return contains(target, "socket:") || contains(target, "eventpoll") || contains(target, "memfd:") ||
         contains(target, "eventfd");
}

// Sockets, memfds, epolls and eventfds that are open beyond those that the test had before it used the
// library.
std::vector<std::string> library_files(const std::vector<std::pair<int, std::string>>& before) {
  std::vector<std::string> found;
  for (auto& file : open_files())
    if (is_library_kind(file.second) && std::find(before.begin(), before.end(), file) == before.end())
      found.push_back(std::to_string(file.first) + " " + file.second);
  return found;
}

void nothing_is_open(const std::vector<std::pair<int, std::string>>& before) {
  std::vector<std::string> left = library_files(before);
  for (const std::string& file : left) FAIL_CHECK("a child has its parent's ", file, " open");
}

// A rank calls on its default stream and on one of its own.
void use(ncclComm_t comm, int nranks) {
  cudaStream_t stream;
  cudaEvent_t event;
  OK(pyncclCpuStreamCreate(&stream));
  OK(pyncclCpuEventCreate(&event));
  std::vector<float> x(20000, 1), y(20000, 1);
  OK(sum(x.data(), x.size(), comm));
  OK(pyncclCpuEventRecord(comm, event, nullptr));
  OK(pyncclCpuStreamWaitEvent(comm, stream, event));
  OK(sum(y.data(), y.size(), comm, stream));
  OK(synchronize(comm, stream));
  OK(synchronize(comm));
  CHECK_EQ(x.back(), float(nranks));
  CHECK_EQ(y.back(), float(nranks));
  OK(pyncclCpuEventDestroy(event));
  OK(pyncclCpuStreamDestroy(stream));
  void* memory;
  OK(ncclMemAlloc(&memory, 10000));
  if (memory) memset(memory, 1, 10000);
  OK(ncclMemFree(memory));
}

void join_and_use(const ncclUniqueId& id, int nranks, int rank) {
  ncclComm_t comm = nullptr;
  if (!OK(ncclCommInitRank(&comm, nranks, id, rank))) return;
  use(comm, nranks);
  OK(ncclCommDestroy(comm));
}

void with_a_grandchild() {
  ncclUniqueId id = new_id();
  pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    at_step("grandchild");
    _exit(status_of([&] { join_and_use(id, 2, 1); }));
  }
  join_and_use(id, 2, 0);
  CHECK_EQ(reap(pid, 25), 0);
}

void own_communicators(int number) {
  at_step("child: a communicator of one rank");
  join_and_use(new_id(), 1, 0);
  if (number % 4 == 1) {
    at_step("child: a communicator of two threads");
    ncclUniqueId id = new_id();
    as_threads(2, [&](int rank) { join_and_use(id, 2, rank); });
  }
  if (number % 8 == 2 && !kCallersPause) {
    at_step("child: a communicator with a grandchild");
    with_a_grandchild();
  }
}

// ---- the forks ----

using Files = std::vector<std::pair<int, std::string>>;

pid_t fork_child(int number, BusyParent& parent, const Files& before, Pause* maker) {
  pid_t pid = parent.fork_now(maker);
  if (pid != 0) return pid;
#if defined(__SANITIZE_THREAD__)
  // A new thread on the cached stack of a parent's thread has its id, and ThreadSanitizer ends the process.
  pthread_attr_t larger;
  pthread_attr_init(&larger);
  pthread_attr_setstacksize(&larger, size_t(64) << 20);
  pthread_setattr_default_np(&larger);
#endif
  alarm(20);
  failures = 0;
  inherited_handles_are_refused(parent);
  nothing_is_open(before);
  own_communicators(number);
  at_step("child: exit");
#if !defined(__SANITIZE_ADDRESS__)  // whose leak check would miss the parent's threads and what they own
  if (number % 5 == 3) exit(failures == 0 ? 0 : 1);
#endif
  _exit(failures == 0 ? 0 : 1);
}

void forks(BusyParent& parent, const Files& before, int count, Pause* maker = nullptr) {
  constexpr size_t kAtOnce = 4;
  std::vector<pid_t> children;
  auto reap_first = [&] {
    CHECK_EQ(reap(children.front(), 30), 0);
    children.erase(children.begin());
  };
  for (int number = 0; number < count && failures == 0; ++number) {
    at_step("fork %d", number);
    children.push_back(fork_child(number, parent, before, maker));
    if (children.size() == kAtOnce) reap_first();
  }
  while (!children.empty()) reap_first();
}

TEST_CASE("forks while four threads call") {
  Files before = open_files();
  BusyParent parent;
  forks(parent, before, scaled(2000, 200, 40));
}

// The sockets and segments of a creation are not of any communicator yet.
TEST_CASE("forks while communicators come and go") {
  Files before = open_files();
  BusyParent parent;
  std::atomic<bool> stop{false}, ended{false};
  Pause pause;
  std::thread maker([&] {
    while (!stop) {
      for (ncclComm_t comm : together(3)) OK(ncclCommAbort(comm));
      if (pause.wanted()) pause.stand_still();
    }
    ended = true;
  });
  maker.detach();  // a child of ThreadSanitizer may get the id of a thread that its parent is yet to join
  forks(parent, before, scaled(300, 60, 20), &pause);
  stop = true;
  CHECK(soon(60, [&] { return ended.load(); }));
}

// The parent goes on as if nothing had been forked, and a child that calls nothing keeps no peer alive.
TEST_CASE("a fork leaves the parent as it was") {
  std::vector<ncclComm_t> comms = together(2);
  as_threads(2, [&](int r) { use(comms[size_t(r)], 2); });
  Has before = process_has();
  pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    _exit(status_of([&] {
      int n;
      ncclCommCount(comms[0], &n);
      own_communicators(2);
    }));
  }
  as_threads(2, [&](int r) { use(comms[size_t(r)], 2); });
  CHECK_EQ(reap(pid, 25), 0);
  CHECK(settles_to(before));
  for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
}

// The group is its parent's: it goes on there, and the child has none.
TEST_CASE("a fork inside a group") {
  std::vector<ncclComm_t> comms = together(2);
  float x[2] = {1, 2};
  OK(ncclGroupStart());
  OK(sum(&x[0], 1, comms[0]));
  pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    failures = 0;
    at_step("child: the end of its parent's group");
    ncclResult_t r = ncclGroupEnd();
    CHECK((r == ncclInvalidUsage || r == ncclInvalidArgument));
    at_step("child: a group of its own");
    ncclComm_t mine = alone();
    float y = 3;
    OK(ncclGroupStart());
    OK(sum(&y, 1, mine));
    OK(ncclGroupEnd());
    OK(synchronize(mine, nullptr, 10000));
    CHECK_EQ(y, 3.0f);
    OK(ncclCommDestroy(mine));
    _exit(failures == 0 ? 0 : 1);
  }
  CHECK_EQ(reap(pid, 25), 0);
  OK(sum(&x[1], 1, comms[1]));
  OK(ncclGroupEnd());
  for (ncclComm_t comm : comms) OK(synchronize(comm, nullptr, 20000));
  for (float v : x) CHECK_EQ(v, 3.0f);
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

// A rank's forked child holds nothing open that would hide the rank's death from the others.
TEST_CASE("a child does not keep its parents rank alive") {
  ncclUniqueId id = new_id();
  int quiet[2];
  CHECK_EQ(pipe(quiet), 0);
  pid_t victim = fork();
  if (victim == 0) {
    alarm(60);
    ncclComm_t comm = nullptr;
    OK(ncclCommInitRank(&comm, 2, id, 1));
    float x = 1;
    OK(sum(&x, 1, comm));
    OK(synchronize(comm));
    pid_t survivor = fork();
    if (survivor == 0) {
      int n;
      ncclCommCount(comm, &n);
      char byte;
      close(quiet[1]);
      (void)!read(quiet[0], &byte, 1);  // until the test is over
      _exit(0);
    }
    kill(getpid(), SIGKILL);
  }
  ncclComm_t comm = nullptr;
  OK(ncclCommInitRank(&comm, 2, id, 0));
  float x = 1;
  OK(sum(&x, 1, comm));
  OK(synchronize(comm));
  CHECK_EQ(reap(victim, 20), -SIGKILL);
  ncclResult_t r = sum(&x, 1, comm);
  RESULT(r == ncclSuccess ? synchronize(comm, nullptr, 20000) : r, ncclRemoteError);
  OK(ncclCommAbort(comm));
  close(quiet[1]);
}

}  // namespace
