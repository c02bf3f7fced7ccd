// What the tests over the C API share: ranks as threads, children that cannot hang, and what a process has.
#pragma once

#include <dirent.h>
#include <malloc.h>
#include <sys/mman.h>

#include <chrono>
#include <functional>
#include <thread>

#include "base/nccl.hpp"
#include "helpers.hpp"

namespace testing {

inline std::string pointer(const void* p) {
  char text[32];
  snprintf(text, sizeof text, "%p", p);
  return text;
}

inline const char* name_of(ncclResult_t r) {
  const char* names[] = {"ncclSuccess",       "ncclUnhandledCudaError", "ncclSystemError",
                         "ncclInternalError", "ncclInvalidArgument",    "ncclInvalidUsage",
                         "ncclRemoteError",   "ncclInProgress",         "ncclTimeout"};
  return unsigned(r) < sizeof names / sizeof *names ? names[r] : "no ncclResult_t";
}

inline bool check_result(ncclResult_t got, ncclResult_t want, const char* call, const char* file, int line) {
  if (got == want) return true;
  ADD_FAIL_CHECK_AT(file, line,
                    formatted("%s is %s, expected %s; last error: %s", call, name_of(got), name_of(want),
                              got == ncclSuccess ? "" : ncclGetLastError(nullptr)));
  return false;
}
#define OK(call) check_result((call), ncclSuccess, #call, __FILE__, __LINE__)
#define RESULT(call, want) check_result((call), want, #call, __FILE__, __LINE__)

// The part must be in the text; the message shows both.
inline void check_contains(const std::string& text, const std::string& part, const char* file, int line) {
  if (contains(text, part)) return;
  ADD_FAIL_CHECK_AT(file, line, "\"", text, "\" does not say \"", part, "\"");
}
#define SAYS(text, part) check_contains((text), (part), __FILE__, __LINE__)

inline std::string last_error(ncclComm_t comm = nullptr) { return ncclGetLastError(comm); }

inline ncclUniqueId new_id() {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  return id;
}

inline ncclComm_t alone() {
  ncclComm_t comm = nullptr;
  OK(ncclCommInitRank(&comm, 1, new_id(), 0));
  return comm;
}

// A communicator of `nranks` ranks in this thread: each a handle.
inline std::vector<ncclComm_t> together(int nranks) {
  std::vector<ncclComm_t> comms(size_t(nranks), nullptr);
  OK(ncclCommInitAll(comms.data(), nranks, nullptr));
  return comms;
}

inline void as_threads(int nranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> ranks;
  for (int r = 0; r < nranks; ++r) ranks.emplace_back([&, r] { body(r); });
  for (std::thread& t : ranks) t.join();
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// What the work costs: the least of several timings, in seconds of this process on a core, since others may
// have the cores.
template <typename Body>
double least_seconds(int times, Body body) {
  auto used = [] {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + double(t.tv_nsec) / 1e9;
  };
  double least = 1e9;
  for (int i = 0; i < times; ++i) {
    double before = used();
    body();
    least = std::min(least, used() - before);
  }
  return least;
}

// True as soon as `condition` holds, false when it does not within `seconds`.
template <typename Condition>
bool soon(double seconds, Condition condition) {
  for (Stopwatch watch; !condition();) {
    if (watch.seconds() > seconds) return false;
    usleep(500);
  }
  return true;
}

// Waits for a child, which is killed when it takes too long: its exit status, or minus the signal.
inline int reap(pid_t pid, double seconds) {
  int status = 0;
  bool came = soon(seconds, [&] { return waitpid(pid, &status, WNOHANG) == pid; });
  if (!came) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// The ranks are forked children, which must succeed, but for a victim, which must be killed; this process
// serves their unique ids.
inline void as_processes_with(int victim, int nranks, const std::function<void(int rank)>& body) {
  std::vector<pid_t> pids;
  Gate gate;
  if (kSanitized) usleep(20000);  // what the library's thread still has to do (Gate)
  for (int r = 0; r < nranks; ++r) {
    fflush(nullptr);
    pid_t pid = fork();
    if (pid == 0) {
      gate.wait();
      _exit(status_of([&] { body(r); }));
    }
    pids.push_back(pid);
  }
  gate.open(nranks);
  for (int r = 0; r < nranks; ++r) CHECK_EQ(reap(pids[size_t(r)], 100), r == victim ? -SIGKILL : 0);
}

inline void as_processes(int nranks, const std::function<void(int rank)>& body) {
  as_processes_with(-1, nranks, body);
}

// A meeting of threads or forked processes that trusts nothing of the library.
class Meeting {
 public:
  explicit Meeting(int size)
      : size_(size),
        came_(static_cast<std::atomic<int>*>(mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Meeting() { munmap(static_cast<void*>(came_), sizeof *came_); }
  // Once every one has come as often as the caller has; or false, after a minute.
  bool operator()() {
    int last = (came_->fetch_add(1) / size_ + 1) * size_;
    return soon(60, [&] { return came_->load() >= last; });
  }

 private:
  const int size_;
  std::atomic<int>* came_;
};

inline ncclResult_t synchronize(ncclComm_t comm, cudaStream_t stream = nullptr, int64_t ms = -1) {
  return pyncclCpuStreamSynchronize(comm, stream, ms);
}

inline ncclResult_t sum(float* x, size_t count, ncclComm_t comm, cudaStream_t stream = nullptr) {
  return ncclAllReduce(x, x, count, ncclFloat32, ncclSum, comm, stream);
}

// What this process has open: number of descriptor to what /proc says it is.
inline std::vector<std::pair<int, std::string>> open_files() {
  std::vector<std::pair<int, std::string>> files;
  DIR* dir = opendir("/proc/self/fd");
  while (dirent* entry = dir ? readdir(dir) : nullptr) {
    int fd = atoi(entry->d_name);
    if (entry->d_name[0] == '.' || fd == dirfd(dir)) continue;
    char target[256] = {};
    if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1) > 0)
      files.push_back({fd, target});
  }
  if (dir) closedir(dir);
  return files;
}

// A line of /proc/self/status, such as "Threads" or "VmRSS", as a number.
inline long process_status(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(std::string(field) + ":", 0) == 0) return atol(line.c_str() + strlen(field) + 1);
  return -1;
}

// Descriptors, threads and memory; the library may end a thread or connection a moment after a call returned.
struct Has {
  long files, threads, kib;
};
inline Has process_has() {
  malloc_trim(0);
  return {long(open_files().size()), process_status("Threads"), process_status("VmRSS")};
}
inline bool settles_to(const Has& before, double seconds = 5) {
  return soon(seconds, [&] {
    return long(open_files().size()) <= before.files && process_status("Threads") <= before.threads;
  });
}

}  // namespace testing
