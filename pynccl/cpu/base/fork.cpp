#include "base/fork.hpp"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace pncpu {
namespace {

// The only lock that a fork takes. Its holder takes no other lock and never waits.
std::mutex g_mutex;
bool g_installed = false;
detail::Part* g_parts = nullptr;
ForkHook* g_hooks = nullptr;
std::atomic<uint32_t> g_epoch{0};

std::set<int>& descriptors() {
  static auto* fds = new std::set<int>;  // only under g_mutex
  return *fds;
}

void before() { g_mutex.lock(); }
void in_parent() { g_mutex.unlock(); }
void in_child() {
  g_epoch.fetch_add(1);
  for (int fd : descriptors()) close(fd);
  descriptors().clear();
  for (detail::Part* part = g_parts; part; part = part->next) part->object.store(nullptr);
  for (ForkHook* hook = g_hooks; hook; hook = hook->next) hook->run();
  g_mutex.unlock();
}

void install() {
  if (g_installed) return;
  g_installed = pthread_atfork(before, in_parent, in_child) == 0;
}

}  // namespace

uint32_t process_epoch() { return g_epoch.load(std::memory_order_relaxed); }

NoFork::NoFork() {
  g_mutex.lock();
  install();
}
NoFork::~NoFork() { g_mutex.unlock(); }
int NoFork::keep(int fd) {
  if (fd < 0) return fd;
  try {
    descriptors().insert(fd);
  } catch (...) {
    ::close(fd);
    throw;
  }
  return fd;
}
void NoFork::close(int fd) {
  if (descriptors().erase(fd)) ::close(fd);
}

void at_fork(ForkHook* hook) {
  std::lock_guard<std::mutex> lock(g_mutex);
  install();
  hook->next = g_hooks;
  g_hooks = hook;
}

void detail::list_part(Part* part) {
  std::lock_guard<std::mutex> lock(g_mutex);
  install();
  if (part->listed) return;
  part->listed = true;
  part->next = g_parts;
  g_parts = part;
}

}  // namespace pncpu
