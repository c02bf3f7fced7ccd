// What a process uses: descriptors, memory and processor time.
#pragma once

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "helpers.hpp"

namespace testing {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void pause_for(double seconds) { usleep(useconds_t(seconds * 1e6)); }

inline int open_descriptors() {
  int n = -3;  // ".", ".." and the folder's own
  DIR* folder = opendir("/proc/self/fd");
  if (!folder) return INT32_MAX;
  while (readdir(folder)) ++n;
  closedir(folder);
  return n;
}

inline long resident_kib() {
  long pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

inline double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](timeval t) { return double(t.tv_sec) + double(t.tv_usec) / 1e6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// AddressSanitizer keeps what is freed for a while, up to 256 MiB.
#if defined(__SANITIZE_ADDRESS__)
constexpr long kQuarantineKib = 300 * 1024;
#else
constexpr long kQuarantineKib = 0;
#endif

// What this process used since the gauge was made.
struct Gauge {
  int descriptors = open_descriptors();
  long kib = resident_kib();
  double processor = processor_seconds(), began = now();
  bool grew_beyond(long most_kib) const { return resident_kib() - kib > most_kib + kQuarantineKib; }
  double share() const { return (processor_seconds() - processor) / (now() - began); }
};

inline void limit_descriptors(rlim_t n) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min(n, limit.rlim_max);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

}  // namespace testing
