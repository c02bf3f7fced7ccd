#include "base/core.hpp"

#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>

#include "base/fork.hpp"

namespace pncpu {
namespace {

uint64_t fnv(uint64_t hash, const std::string& text) {
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

std::string first_line(const char* path) {
  char line[256] = {};
  if (FILE* f = fopen(path, "re")) {
    if (!fgets(line, sizeof line, f)) line[0] = 0;
    fclose(f);
  }
  return line;
}

std::string namespace_of(const char* path) {
  struct stat st;
  return stat(path, &st) == 0 ? std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino) : "?";
}

}  // namespace

Token Token::random() {
  Token t;
  char* at = reinterpret_cast<char*>(&t);
  for (size_t got = 0; got < sizeof t;) {
    ssize_t n = getrandom(at + got, sizeof t - got, 0);
    if (n > 0) got += size_t(n);
  }
  return t;
}

Token Token::of(const std::string& text) {
  return {fnv(0xcbf29ce484222325, text), fnv(0x9ae16a3b2f90404f, text + "#")};
}

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0) return "localhost";
  return name;
}

namespace {
// Processes can share memory and abstract Unix sockets on one machine, in one network namespace, as one user:
// see the table of hosts in docs/architecture.md, which _base/host.py follows, too.
struct Machine {
  std::string text = first_line("/proc/sys/kernel/random/boot_id") + namespace_of("/proc/self/ns/net") +
                     namespace_of("/proc/self/ns/user");
  std::string pids = host_name() + namespace_of("/proc/self/ns/pid");
};
}  // namespace

uint64_t host_id() {
  const Machine& machine = per_process<Machine>();
  const char* forced = param_str("NCCL_HOSTID");
  std::string text = machine.text + "/" + std::to_string(geteuid()) + "/";
  return fnv(0xcbf29ce484222325, text + (forced ? std::string("id:") + forced : machine.pids));
}

int this_thread() {
  static thread_local int id = int(syscall(SYS_gettid));
  return id;
}

Caller& this_caller() {
  static thread_local Caller caller{this_thread(), false};
  return caller;
}

void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

}  // namespace pncpu
