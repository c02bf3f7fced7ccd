// Helpers of all tests: variables, files, and forked children whose failed checks fail the test.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "base/log.hpp"

namespace testing {

namespace fs = std::filesystem;

// How often a test does something, plain and under the sanitizers, which are slower.
#if defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
constexpr int scaled(int, int, int tsan) { return tsan; }
#elif defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
constexpr int scaled(int, int asan, int) { return asan; }
#else
constexpr bool kSanitized = false;
constexpr int scaled(int plain, int, int) { return plain; }
#endif

// The failed checks of this process. A forked child counts its own and reports them by its exit status.
extern std::atomic<int> failures;

// The running test's own directory, empty at its start.
extern fs::path scratch;

// A program whose tests mostly wait runs three of them at once by `const AtOnce kAtOnce(3);`.
struct AtOnce {
  explicit AtOnce(size_t tests);
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void set(const char* name, const char* value) { setenv(name, value, 1); }

// A variable that sets how much a test does. Read it before main, which cleans the environment of each test.
inline long from_environment(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

__attribute__((format(printf, 1, 2))) inline std::string formatted(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

// Runs `body` in a forked child and returns its exit status. noexcept: an exception ends the child, because
// it must not unwind the frames of the parent, whose threads do not exist here.
template <typename Body>
int status_of(Body body) noexcept {
  failures = 0;
  body();
  fflush(nullptr);
  return failures == 0 ? 0 : 1;
}

// The exit status of `body` in a forked child, or minus the signal that ended it.
template <typename Body>
int in_child(Body body) {
  fflush(nullptr);
  pid_t pid = fork();
  if (pid == 0) {
    pncpu::log_atfork_child();
    exit(status_of(body));
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Holds forked children until all of them are there. AddressSanitizer's allocator does not survive a fork
// while another thread allocates, so nobody forks once a library's thread has something to do.
class Gate {
 public:
  Gate() { CHECK_EQ(pipe(ends_), 0); }
  ~Gate() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void wait() const {
    char byte;
    CHECK_EQ(read(ends_[0], &byte, 1), 1);
  }
  void open(int children) const {
    for (int i = 0; i < children; ++i) CHECK_EQ(write(ends_[1], "g", 1), 1);
  }

 private:
  int ends_[2];
};

// What a test is at, for the message of its alarm or crash: a test of thousands of rounds says which.
inline char current_step[256] = "";

__attribute__((format(printf, 1, 2))) inline void at_step(const char* format, ...) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(current_step, sizeof current_step, format, arguments);
  va_end(arguments);
}

}  // namespace testing
