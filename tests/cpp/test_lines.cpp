// The connections between processes: one for each pair of them, whatever ranks and communicators they have.
#include <algorithm>

#include "ranks.hpp"

using namespace testing;

namespace {

size_t sockets() {
  auto files = open_files();
  return size_t(
      std::count_if(files.begin(), files.end(), [](auto& file) { return contains(file.second, "socket:"); }));
}

ncclComm_t join(const ncclUniqueId& id, int nranks, int rank) {
  ncclComm_t comm = nullptr;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  return comm;
}

void use(ncclComm_t comm, int nranks) {
  std::vector<float> x(100, 1);
  if (!comm || !OK(sum(x.data(), x.size(), comm)) || !OK(synchronize(comm, nullptr, 60000))) return;
  CHECK_EQ(x.back(), float(nranks));
}

// The ranks are `threads` in each of `processes`.
void spread(int processes, int threads, int victim,
            const std::function<void(int process, int thread)>& body) {
  as_processes_with(victim, processes, [&](int process) {
    alarm(90);
    as_threads(threads, [&](int thread) { body(process, thread); });
  });
}

TEST_CASE("communicators share a line") {
  constexpr int kProcesses = 4, kThreads = 8, kRanks = kProcesses * kThreads;
  ncclUniqueId id = new_id(), own[kProcesses];
  for (ncclUniqueId& one : own) one = new_id();
  as_processes(kProcesses, [&](int process) {
    alarm(90);
    // The service listens.
    OK(ncclCommDestroy(join(own[process], 1, 0)));
    const size_t before = sockets();
    size_t whole = 0, split = 0;
    Meeting here(kThreads);
    as_threads(kThreads, [&](int thread) {
      const int rank = thread * kProcesses + process;
      ncclComm_t comm = join(id, kRanks, rank);
      use(comm, kRanks);
      here();
      if (thread == 0) whole = sockets();
      here();
      std::vector<ncclComm_t> parts(3);
      const int colors[] = {rank % 2, rank / 16, rank / 8 % 2};
      for (size_t i = 0; i < parts.size(); ++i) {
        OK(ncclCommSplit(comm, colors[i], -rank, &parts[i], nullptr));
        use(parts[i], kRanks / 2);
      }
      here();
      if (thread == 0) split = sockets();
      here();
      for (ncclComm_t part : parts) OK(ncclCommDestroy(part));
      use(comm, kRanks);
      OK(ncclCommDestroy(comm));
    });
    CHECK_EQ(whole, before + kProcesses - 1);
    CHECK_EQ(split, before + kProcesses - 1);
    CHECK(soon(20, [&] { return sockets() == before; }));
  });
}

TEST_CASE("a death is told to all communicators") {
  constexpr int kProcesses = 3, kThreads = 2, kRanks = kProcesses * kThreads;
  ncclUniqueId id = new_id();
  Meeting all(kRanks);
  spread(kProcesses, kThreads, 1, [&](int process, int thread) {
    const int rank = thread * kProcesses + process;
    ncclComm_t comm = join(id, kRanks, rank), part = nullptr;
    OK(ncclCommSplit(comm, thread, rank, &part, nullptr));
    use(part, kProcesses);
    all();
    if (process == 1 && thread == 0) kill(getpid(), SIGKILL);
    if (process == 1) pause();
    for (ncclComm_t c : {comm, part}) {
      ncclResult_t state = ncclSuccess;
      CHECK(soon(30, [&] { return OK(ncclCommGetAsyncError(c, &state)) && state != ncclSuccess; }));
      CHECK_EQ(int(state), int(ncclRemoteError));
      SAYS(last_error(c), "rank 1 (pid");
    }
    OK(ncclCommAbort(part));
    OK(ncclCommAbort(comm));
  });
}

TEST_CASE("a rank that aborts leaves the line to the others") {
  constexpr int kProcesses = 2, kThreads = 3, kRanks = kProcesses * kThreads;
  ncclUniqueId id = new_id();
  Meeting made(kRanks), aborted(kRanks);
  spread(kProcesses, kThreads, -1, [&](int process, int thread) {
    ncclComm_t comm = join(id, kRanks, thread * kProcesses + process), part = nullptr;
    OK(ncclCommSplit(comm, thread, process, &part, nullptr));
    made();
    if (thread == 0 && process == 0) OK(ncclCommAbort(part));
    if (thread == 0 && process == 1) {
      ncclResult_t state = ncclSuccess;
      CHECK(soon(30, [&] { return OK(ncclCommGetAsyncError(part, &state)) && state != ncclSuccess; }));
      SAYS(last_error(part), "rank 0 aborted its communicator");
    }
    aborted();
    for (int i = 0; i < 20 && thread > 0; ++i) use(part, kProcesses);
    use(comm, kRanks);
    if (thread > 0 || process > 0) OK(thread > 0 ? ncclCommDestroy(part) : ncclCommAbort(part));
    OK(ncclCommDestroy(comm));
  });
}

// Each thread makes communicators with the other process again and again, of which the one or the other is
// rank 0: lines are closed while others are wanted.
TEST_CASE("lines that come and go") {
  constexpr int kThreads = 3;
  const int rounds = scaled(60, 20, 10);
  std::vector<ncclUniqueId> ids(size_t(kThreads * rounds));
  for (ncclUniqueId& id : ids) id = new_id();
  Meeting all(2), pairs[kThreads] = {Meeting(2), Meeting(2), Meeting(2)};
  as_processes(2, [&](int process) {
    alarm(90);
    for (bool own_hosts : {false, true}) {
      if (own_hosts) set("NCCL_HOSTID", std::to_string(process).c_str());
      as_threads(kThreads, [&](int thread) {
        for (int i = own_hosts ? rounds / 2 : 0; i < (own_hosts ? rounds : rounds / 2); ++i) {
          at_step("own hosts %d, round %d, thread %d", own_hosts, i, thread);
          ncclComm_t comm = join(ids[size_t(i * kThreads + thread)], 2, (process + thread + i) % 2);
          use(comm, 2);
          pairs[thread]();  // an abort may end a rank that still waits
          OK(i % 3 ? ncclCommDestroy(comm) : ncclCommAbort(comm));
        }
      });
      all();
      // What is left are the listeners.
      CHECK(soon(20, [&] { return sockets() == 2; }));
    }
  });
}

}  // namespace
