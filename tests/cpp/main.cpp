// The main program of every test_*.cpp. It runs each doctest test case in a process of its own, so that no
// test sees another's environment or state. doctest's options choose the test cases, for example
// `-tc=*fork*`.

// doctest installs no signal handlers: tests abort children on purpose, and sanitizers report crashes
// themselves.
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS
#define DOCTEST_CONFIG_IMPLEMENT
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <iostream>

#include "helpers.hpp"

namespace testing {

std::atomic<int> failures{0};
fs::path scratch;

namespace {

size_t at_once = 1;
int started = 0;
std::vector<std::string> listed;

// Records what doctest reports to listeners only: the test cases that the options choose, the number of test
// cases started, and the number of checks failed so far.
class Listener final : public doctest::IReporter {
 public:
  explicit Listener(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData& query) override {
    for (unsigned i = 0; i < query.num_data; ++i) listed.push_back(query.data[i]->m_name);
  }
  void test_case_start(const doctest::TestCaseData&) override { ++started; }
  void test_case_exception(const doctest::TestCaseException&) override { ++failures; }
  void log_assert(const doctest::AssertData& check) override {
    failures += check.m_failed && counts(check.m_at);
  }
  void log_message(const doctest::MessageData& message) override { failures += counts(message.m_severity); }

  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}

 private:
  static int counts(int severity) { return (severity & doctest::assertType::is_warn) == 0; }
};
REGISTER_LISTENER("testing", 0, Listener);

std::vector<std::string> chosen_tests(int argc, char** argv) {
  std::vector<const char*> arguments(argv, argv + argc);
  arguments.insert(arguments.end(), {"--list-test-cases", "--reporters=none"});
  doctest::Context(int(arguments.size()), arguments.data()).run();
  return listed;
}

// ---- in the process of a test ----

void clean_environment() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string name = std::string(*entry).substr(0, strcspn(*entry, "="));
    if (name.rfind("NCCL_", 0) == 0 || name.rfind("PYNCCL_", 0) == 0) names.push_back(name);
  }
  names.insert(names.end(), {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOME"});
  for (const std::string& name : names) unsetenv(name.c_str());
}

void tell_step(int signal) {
  char text[320];
  int size = snprintf(text, sizeof text, "     signal %d at: %s\n", signal, current_step);
  if (size > 0 && write(STDERR_FILENO, text, size_t(size)) < 0) _exit(124);
  raise(signal);  // SA_RESETHAND: this time it ends the process
}

void tell_step_at(std::initializer_list<int> signals) {
  struct sigaction action = {};
  action.sa_handler = tell_step;
  action.sa_flags = int(SA_RESETHAND | SA_NODEFER);
  for (int signal : signals) sigaction(signal, &action, nullptr);
}

// PYNCCL_TEST_ALARM=seconds ends a test that takes longer.
unsigned seconds_of_a_test() {
  const char* seconds = getenv("PYNCCL_TEST_ALARM");
  return seconds ? unsigned(atoi(seconds)) : kSanitized ? 240 : 120;
}

int status_of_test(doctest::Context& context, const std::string& name) {
  alarm(seconds_of_a_test());
  tell_step_at({SIGALRM});
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  tell_step_at({SIGSEGV, SIGBUS, SIGABRT});
#endif
  clean_environment();
  context.clearFilters();
  context.addFilter("test-case", name.c_str());
  context.setOption("minimal", true);
  context.setCout(&std::cerr);  // stdout is some tests' own
  int status = context.run();
  if (started == 1) return status;
  fprintf(stderr, "%d test cases have the name \"%s\"\n", started, name.c_str());
  return 1;
}

// ---- in the process that starts them ----

// A test is a process group of its own: what it leaves behind when it is ended is ended with it.
class Run {
 public:
  Run(doctest::Context& context, const std::string& name, const fs::path& root)
      : name_(name), start_(std::chrono::steady_clock::now()) {
    scratch = root / name;
    fs::create_directories(scratch);
    fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    exit(status_of_test(context, name));
  }
  pid_t pid() const { return pid_; }
  bool ended(int status) const {
    kill(-pid_, SIGKILL);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    printf("%s %s (%.1f s)\n", status == 0 ? "ok  " : "FAIL", name_.c_str(), seconds);
    if (WIFSIGNALED(status)) printf("     ended by signal %d\n", WTERMSIG(status));
    return status == 0;
  }

 private:
  std::string name_;
  std::chrono::steady_clock::time_point start_;
  pid_t pid_;
};

bool ended_well(std::vector<Run>& running) {
  int status = 0;
  pid_t pid;
  while ((pid = waitpid(-1, &status, 0)) < 0 && errno == EINTR) continue;
  auto ended = std::find_if(running.begin(), running.end(), [&](const Run& run) { return run.pid() == pid; });
  if (ended == running.end()) return true;  // a test's orphan
  bool well = ended->ended(status);
  running.erase(ended);
  return well;
}

int run_each(doctest::Context& context, const std::vector<std::string>& tests) {
  std::string root = fs::temp_directory_path() / "pynccl-test-XXXXXX";
  if (mkdtemp(root.data()) == nullptr) {
    perror("mkdtemp");
    return 2;
  }
  size_t failed = 0;
  std::vector<Run> running;
  if (tests.empty()) fprintf(stderr, "the options choose no test case\n");
  for (const std::string& name : tests) {
    running.emplace_back(context, name, root);
    while (running.size() >= at_once) failed += !ended_well(running);
  }
  while (!running.empty()) failed += !ended_well(running);
  fs::remove_all(root);
  printf("%zu of %zu tests failed\n", failed, tests.size());
  return failed == 0 && !tests.empty() ? 0 : 1;
}

}  // namespace

AtOnce::AtOnce(size_t tests) { at_once = tests; }

}  // namespace testing

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  if (context.shouldExit()) return context.run();  // --help, --list-test-cases
  return testing::run_each(context, testing::chosen_tests(argc, argv));
}
