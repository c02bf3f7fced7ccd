#include "base/log.hpp"

#include <fcntl.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "base/fork.hpp"
#include "base/params.hpp"

namespace pncpu {
namespace {

#define PNCPU_TEXT(value) #value
#define PNCPU_VERSION(major, minor, patch) PNCPU_TEXT(major) "." PNCPU_TEXT(minor) "." PNCPU_TEXT(patch)
constexpr char kVersionLine[] =
    "NCCL version " PNCPU_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH) "+pynccl-cpu";
constexpr int kUnread = -1;
constexpr size_t kTextBytes = 4096;
constexpr size_t kLongestPrefix = 256;  // of a function or a rank; its length is a uint8_t
constexpr char kPlace[] = "rank %d of %d: ";
constexpr const char* kLevels[] = {"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};

// Everything here is trivially destructible: threads may still log while the process exits.
std::mutex setup_mutex;
std::atomic<int> active_level{kUnread};
std::atomic<int> destination{STDOUT_FILENO};
std::atomic<bool> version_shown{false};
int file_fd = -1;  // guarded by setup_mutex, as is writing `host`
char host[256] = "";

struct Recorded {
  ErrorCode code;
  LateRanks late;
  char text[kTextBytes] = "";
};
std::mutex newest_mutex;
Recorded newest;

thread_local Recorded thread_error;
thread_local bool has_own_error;

class KeepErrno {
 public:
  ~KeepErrno() { errno = saved_; }

 private:
  int saved_ = errno;
};

void write_all(const char* data, size_t size) {
  int fd = destination.load(std::memory_order_acquire);
  while (size > 0) {
    ssize_t n = write(fd, data, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // the log is the last place to report an error
    data += n;
    size -= static_cast<size_t>(n);
  }
}

size_t cut(int formatted, size_t capacity) {
  if (formatted < 0) return 0;
  return std::min(static_cast<size_t>(formatted), capacity - 1);
}

void write_line(Level level, const char* text) {
  char line[kTextBytes + sizeof(host) + 64];
  int n;
  if (level == Level::Version) {
    n = snprintf(line, sizeof(line), "%s\n", text);
  } else {
    int tid = static_cast<int>(syscall(SYS_gettid));
    n = snprintf(line, sizeof(line), "%s:%d:%d [0] NCCL %s %s\n", host, static_cast<int>(getpid()), tid,
                 kLevels[static_cast<int>(level)], text);
  }
  size_t size = cut(n, sizeof(line));
  if (size > 0) line[size - 1] = '\n';
  write_all(line, size);
}

std::string expand(const char* pattern) {
  std::string path;
  for (const char* c = pattern; *c != '\0'; ++c) {
    char key = *c == '%' ? c[1] : '\0';
    if (key == 'h') {
      path += host;
    } else if (key == 'p') {
      path += std::to_string(getpid());
    } else if (key == '%') {
      path += '%';
    } else {
      path += *c;
      continue;
    }
    ++c;
  }
  return path;
}

int parse_level(const char* text) {
  if (text == nullptr || strcmp(text, "0") == 0) return 0;
  for (int level = 0; level <= static_cast<int>(Level::Trace); ++level) {
    if (strcasecmp(text, kLevels[level]) == 0) return level;
  }
  return kUnread;
}

// The new file gets the old file's descriptor number: another thread may be about to write to it.
bool open_file(const std::string& path) {
  int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return false;
  if (file_fd < 0) {
    file_fd = fd;
  } else {
    dup3(fd, file_fd, O_CLOEXEC);
    close(fd);
  }
  destination.store(file_fd, std::memory_order_release);
  return true;
}

void read_host() {
  if (host[0] != '\0') return;
  if (gethostname(host, sizeof(host) - 1) != 0) snprintf(host, sizeof(host), "unknown");
  host[strcspn(host, ".")] = '\0';
}

// param_str never logs, so it cannot take setup_mutex again.
int setup() {
  const char* wanted = param_str("NCCL_DEBUG");
  const char* file = param_str("NCCL_DEBUG_FILE");
  std::lock_guard<std::mutex> lock(setup_mutex);
  int level = active_level.load(std::memory_order_relaxed);
  if (level != kUnread) return level;
  read_host();
  level = parse_level(wanted);
  bool malformed = level == kUnread;
  if (malformed) level = static_cast<int>(Level::Warn);
  std::string path = file != nullptr && level > 0 ? expand(file) : "";
  bool opened = path.empty() || open_file(path);
  if (path.empty() || !opened) destination.store(STDOUT_FILENO, std::memory_order_release);
  int open_errno = errno;
  active_level.store(level, std::memory_order_release);
  if (level > 0 && !version_shown.exchange(true)) write_line(Level::Version, kVersionLine);
  if (malformed) {
    std::string text = std::string("NCCL_DEBUG is \"") + wanted +
                       "\", not one of VERSION, WARN, INFO, ABORT, TRACE; WARN is used";
    write_line(Level::Warn, text.c_str());
  }
  if (!opened && level >= static_cast<int>(Level::Warn)) {
    std::string text =
        "NCCL_DEBUG_FILE: cannot open " + path + ": " + strerror(open_errno) + "; stdout is used";
    write_line(Level::Warn, text.c_str());
  }
  return level;
}

int level_now() {
  int level = active_level.load(std::memory_order_acquire);
  return level != kUnread ? level : setup();
}

void mark_cut(char (&text)[kTextBytes], int wanted) {
  if (wanted >= static_cast<int>(sizeof(text))) memcpy(text + sizeof(text) - 4, "...", 4);
}

void copy_text(char (&to)[kTextBytes], const char* text) {
  mark_cut(to, snprintf(to, sizeof(to), "%s", text));
}

void format_text(char (&to)[kTextBytes], size_t used, const char* fmt, va_list args) {
  mark_cut(to, int(used) + vsnprintf(to + used, sizeof(to) - used, fmt, args));
}

void record_error(ErrorCode code, const char* text, const LateRanks& late = {}) {
  thread_error.code = code;
  thread_error.late = late;
  copy_text(thread_error.text, text);
  has_own_error = true;
  std::lock_guard<std::mutex> lock(newest_mutex);
  newest = thread_error;
}

// `text` begins with one of the two, of so many bytes.
ncclResult_t fail_after(char (&text)[kTextBytes], int function, int place, ErrorCode code, const char* fmt,
                        va_list args) {
  code.function = static_cast<uint8_t>(function);
  code.place = static_cast<uint8_t>(place);
  format_text(text, static_cast<size_t>(function + place), fmt, args);
  record_error(code, text);
  if (level_now() >= static_cast<int>(Level::Warn)) write_line(Level::Warn, text);
  return code.result;
}

const Recorded& recorded_error() {
  if (!has_own_error) {
    std::lock_guard<std::mutex> lock(newest_mutex);
    thread_error = newest;
  }
  return thread_error;
}

}  // namespace

void log(Level level, const char* fmt, ...) {
  KeepErrno keep;
  if (static_cast<int>(level) > level_now()) return;
  char text[kTextBytes];
  va_list args;
  va_start(args, fmt);
  format_text(text, 0, fmt, args);
  va_end(args);
  write_line(level, text);
}

ncclResult_t fail(ErrorCode code, const char* fmt, ...) {
  KeepErrno keep;
  char text[kTextBytes];
  va_list args;
  va_start(args, fmt);
  ncclResult_t result = fail_after(text, 0, 0, code, fmt, args);
  va_end(args);
  return result;
}

ncclResult_t fail_in(const char* function, ErrorCode code, const char* fmt, ...) {
  KeepErrno keep;
  char text[kTextBytes];
  va_list args;
  va_start(args, fmt);
  ncclResult_t result =
      fail_after(text, snprintf(text, kLongestPrefix, "%s: ", function), 0, code, fmt, args);
  va_end(args);
  return result;
}

ncclResult_t fail_at(int rank, int nranks, ErrorCode code, const char* fmt, ...) {
  KeepErrno keep;
  char text[kTextBytes];
  va_list args;
  va_start(args, fmt);
  ncclResult_t result =
      fail_after(text, 0, snprintf(text, kLongestPrefix, kPlace, rank, nranks), code, fmt, args);
  va_end(args);
  return result;
}

std::string place_of(int rank, int nranks) {
  char text[kLongestPrefix];
  snprintf(text, sizeof text, kPlace, rank, nranks);
  return text;
}

void set_last_error(ErrorCode code, const std::string& text, const LateRanks& late) noexcept {
  record_error(code, text.c_str(), late);
}

ncclResult_t blame(const LateRanks& late) noexcept {
  thread_error.late = late;
  return thread_error.code.result;
}

const char* last_error() { return recorded_error().text; }

ErrorCode last_error_code() { return recorded_error().code; }

LateRanks late_ranks() { return recorded_error().late; }

ErrorCode last_error_as(ncclResult_t result) {
  ErrorCode code = last_error_code();
  code.result = result;
  return code;
}

void print(const std::string& text) {
  KeepErrno keep;
  level_now();
  write_all(text.data(), text.size());
}

void reset_debug() {
  std::lock_guard<std::mutex> lock(setup_mutex);
  active_level.store(kUnread, std::memory_order_release);
}

namespace {
ForkHook fork_hook{log_atfork_child};
[[maybe_unused]] const bool hooked = (at_fork(&fork_hook), true);
}  // namespace

void log_atfork_child() {
  new (&setup_mutex) std::mutex;
  new (&newest_mutex) std::mutex;
  active_level.store(kUnread, std::memory_order_release);  // %p is another file now
}

}  // namespace pncpu
