// Common helpers: futexes, doorbells, tokens, time.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>

#include "base/log.hpp"
#include "base/nccl.hpp"
#include "base/net.hpp"
#include "base/params.hpp"

namespace pncpu {

constexpr size_t kCacheLine = 64;

inline constexpr size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
inline Deadline after_ms(int64_t ms) { return Clock::now() + std::chrono::milliseconds(ms); }
inline Deadline after_seconds(double s) { return Clock::now() + std::chrono::microseconds(int64_t(s * 1e6)); }
inline constexpr Deadline kForever = Deadline::max();

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits while *word == value, for `ns` at most. The word may lie in memory that other processes share.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t value, int64_t ns) {
  timespec ts{time_t(ns / 1000000000), long(ns % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &ts, nullptr, 0);
}
inline void futex_wake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// An event count. A producer publishes, then rings. A consumer looks, checks for work, and waits if there is
// none.
struct Doorbell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};

  void ring() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&rings);
  }
  uint32_t look() const { return rings.load(std::memory_order_acquire); }
  void wait(uint32_t seen, int64_t ns) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (rings.load(std::memory_order_seq_cst) == seen) futex_wait(&rings, seen, ns);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

// 128 random bits that serve as a capability.
struct Token {
  uint64_t a = 0, b = 0;
  bool operator==(const Token& o) const { return a == o.a && b == o.b; }
  bool operator!=(const Token& o) const { return !(*this == o); }
  bool operator<(const Token& o) const { return a != o.a ? a < o.a : b < o.b; }
  static Token random();
  static Token of(const std::string& text);
};

std::string host_name();
// Equal for ranks that can share memory: one user on one machine and in one network namespace, with one
// NCCL_HOSTID, or without it in one pid namespace.
uint64_t host_id();
void name_this_thread(const char* name);
int this_thread();  // the kernel's thread id

// The thread for which this thread makes its calls: itself, or one that started this thread and waits for it.
struct Caller {
  int thread;    // the kernel's thread id
  bool limited;  // it stops waiting some time
};
Caller& this_caller();

}  // namespace pncpu
