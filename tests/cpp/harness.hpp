// A few lines in place of a test framework: checks that count failures, and a child process for each test, so
// that none sees another's environment or state.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
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
  names.insert(names.end(), {"LOCAL_WORLD_SIZE", "HOME"});
  for (const std::string& name : names) unsetenv(name.c_str());
}

inline bool run(const Test& test, const fs::path& root) {
  scratch = root / test.name;
  fs::create_directories(scratch);
  int status = in_child([&] {
    alarm(120);
    test.body();
  });
  printf("%s %s\n", status == 0 ? "ok  " : "FAIL", test.name);
  if (status < 0) printf("     ended by signal %d\n", -status);
  return status == 0;
}

inline int run_all(const Test* tests, size_t count) {
  clean_environment();
  std::string root = fs::temp_directory_path() / "pynccl-test-XXXXXX";
  if (mkdtemp(root.data()) == nullptr) {
    perror("mkdtemp");
    return 2;
  }
  int failed = 0;
  for (size_t i = 0; i < count; ++i) failed += !run(tests[i], root);
  fs::remove_all(root);
  printf("%d of %zu tests failed\n", failed, count);
  return failed == 0 ? 0 : 1;
}

}  // namespace testing
