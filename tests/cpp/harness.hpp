// A few lines in place of a test framework: checks that count failures, and a child process for each test, so
// that none sees another's environment or state.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "base/log.hpp"

namespace testing {

namespace fs = std::filesystem;

inline std::atomic<int> failures{0};
inline fs::path scratch;  // this test's directory

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                             \
    }                                                                         \
  } while (0)

#define CHECK_EQ(left, right)                                                                    \
  do {                                                                                           \
    auto left_value = (left);                                                                    \
    decltype(left_value) right_value = (right);                                                  \
    if (!(left_value == right_value)) {                                                          \
      std::ostringstream text;                                                                   \
      text << __FILE__ << ":" << __LINE__ << ": failed: " #left " == " #right ": " << left_value \
           << " != " << right_value << "\n";                                                     \
      fputs(text.str().c_str(), stderr);                                                         \
      ++failures;                                                                                \
    }                                                                                            \
  } while (0)

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void set(const char* name, const char* value) { setenv(name, value, 1); }

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

// The exit status of `body` in a forked child, or minus the signal that ended it.
template <typename Body>
int in_child(Body body) {
  fflush(nullptr);
  pid_t pid = fork();
  if (pid == 0) {
    pncpu::log_atfork_child();
    failures = 0;
    body();
    exit(failures == 0 ? 0 : 1);
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

inline void tell_step(int signal) {
  char text[320];
  int size = snprintf(text, sizeof text, "     signal %d at: %s\n", signal, current_step);
  if (size > 0 && write(STDERR_FILENO, text, size_t(size)) < 0) _exit(124);
  raise(signal);  // SA_RESETHAND: this time it ends the process
}

inline void tell_step_at(std::initializer_list<int> signals) {
  struct sigaction action = {};
  action.sa_handler = tell_step;
  action.sa_flags = int(SA_RESETHAND | SA_NODEFER);
  for (int signal : signals) sigaction(signal, &action, nullptr);
}

struct Test {
  const char* name;
  void (*body)();
};
#define TEST(name) {#name, name}

inline void clean_environment() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string name = std::string(*entry).substr(0, strcspn(*entry, "="));
    if (name.rfind("NCCL_", 0) == 0 || name.rfind("PYNCCL_", 0) == 0) names.push_back(name);
  }
  names.insert(names.end(), {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOME"});
  for (const std::string& name : names) unsetenv(name.c_str());
}

inline unsigned test_seconds = 120;

// A test is a process group of its own: what it leaves behind when it is ended is ended with it.
class Run {
 public:
  Run(const Test& test, const fs::path& root) : test_(test), start_(std::chrono::steady_clock::now()) {
    scratch = root / test.name;
    fs::create_directories(scratch);
    fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    tell_step_at({SIGALRM});
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    tell_step_at({SIGSEGV, SIGBUS, SIGABRT});
#endif
    alarm(test_seconds);
    failures = 0;
    test.body();
    exit(failures == 0 ? 0 : 1);
  }
  pid_t pid() const { return pid_; }
  bool ended(int status) const {
    kill(-pid_, SIGKILL);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    printf("%s %s (%.1f s)\n", status == 0 ? "ok  " : "FAIL", test_.name, seconds);
    if (WIFSIGNALED(status)) printf("     ended by signal %d\n", WTERMSIG(status));
    return status == 0;
  }

 private:
  Test test_;
  std::chrono::steady_clock::time_point start_;
  pid_t pid_;
};

// PYNCCL_TEST_ONLY=part runs the tests whose names contain it; PYNCCL_TEST_ALARM=seconds ends a test that
// takes longer. Tests that mostly wait may run several `at_once`.
inline int run_all(const Test* tests, size_t count, size_t at_once = 1) {
  std::string only = getenv("PYNCCL_TEST_ONLY") ? getenv("PYNCCL_TEST_ONLY") : "";
  if (const char* seconds = getenv("PYNCCL_TEST_ALARM")) test_seconds = unsigned(atoi(seconds));
  clean_environment();
  std::string root = fs::temp_directory_path() / "pynccl-test-XXXXXX";
  if (mkdtemp(root.data()) == nullptr) {
    perror("mkdtemp");
    return 2;
  }
  size_t failed = 0, chosen = 0;
  std::vector<Run> running;
  auto wait_for_one = [&] {
    int status = 0;
    pid_t pid;
    while ((pid = waitpid(-1, &status, 0)) < 0 && errno == EINTR) continue;
    auto ended =
        std::find_if(running.begin(), running.end(), [&](const Run& run) { return run.pid() == pid; });
    if (ended == running.end()) return;
    failed += !ended->ended(status);
    running.erase(ended);
  };
  for (size_t i = 0; i < count; ++i) {
    if (!contains(tests[i].name, only)) continue;
    ++chosen;
    running.emplace_back(tests[i], root);
    while (running.size() >= at_once) wait_for_one();
  }
  while (!running.empty()) wait_for_one();
  fs::remove_all(root);
  printf("%zu of %zu tests failed\n", failed, chosen);
  return failed == 0 && chosen > 0 ? 0 : 1;
}

}  // namespace testing
