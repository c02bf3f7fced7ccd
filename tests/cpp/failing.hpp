// Failures to inject into the library: this program's own operator new, pthread_create, mmap and calls that
// make descriptors, of which one, the k-th that the library makes from now on, fails. Include it once a
// program.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace failing {

enum Kind { kNew, kThread, kMap, kSocket, kAccept, kEventfd, kEpoll, kMemfd, kKinds };
constexpr const char* kNames[] = {"operator new", "pthread_create", "mmap",          "socket",
                                  "accept",       "eventfd",        "epoll_create1", "memfd_create"};

inline std::atomic<int> kind{kKinds};
inline std::atomic<long> left{0};  // calls of that kind until the one that fails
inline std::atomic<bool> fired{false};
inline std::atomic<long> budget{-1};  // bytes that operator new still gives; negative: without limit

// The test's own code must not fail: a thread of the test says so, and takes it back inside the library.
inline thread_local bool exempt = false;

inline void arm(Kind which, long k) {
  fired = false;
  left = k;
  kind = which;
}
inline void disarm() { kind = kKinds; }

inline bool fails(Kind which) {
  if (exempt || kind.load(std::memory_order_relaxed) != which || left.fetch_sub(1) != 0) return false;
  return fired = true;
}

inline bool over_budget(size_t bytes) {
  if (exempt || budget.load(std::memory_order_relaxed) < 0) return false;
  return budget.fetch_sub(long(bytes)) < long(bytes) ? (budget = 0, true) : false;
}

inline void* allocate(size_t bytes, size_t alignment = 0) {
  if (fails(kNew) || over_budget(bytes)) return nullptr;
  if (!alignment) return malloc(bytes ? bytes : 1);
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

inline void* must(void* p) {
  if (!p) throw std::bad_alloc();
  return p;
}

template <class F>
F* next(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

class TestCode {
 public:
  explicit TestCode(bool on = true) : before_(exempt) { exempt = on; }
  ~TestCode() { exempt = before_; }

 private:
  bool before_;
};

// A call into the library, whose failures are the library's.
template <class Call>
auto inside(Call call) {
  TestCode library(false);
  return call();
}
#define LIBRARY(call) failing::inside([&] { return call; })

}  // namespace failing

void* operator new(size_t n) { return failing::must(failing::allocate(n)); }
void* operator new[](size_t n) { return failing::must(failing::allocate(n)); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return failing::allocate(n); }
void* operator new[](size_t n, const std::nothrow_t&) noexcept { return failing::allocate(n); }
void* operator new(size_t n, std::align_val_t a) { return failing::must(failing::allocate(n, size_t(a))); }
void* operator new[](size_t n, std::align_val_t a) { return failing::must(failing::allocate(n, size_t(a))); }
void operator delete(void* p) noexcept { free(p); }
void operator delete[](void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete[](void* p, size_t) noexcept { free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { free(p); }
void operator delete(void* p, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { free(p); }

#define FAILING(kind, error, name, ...)                        \
  if (failing::fails(failing::kind)) return errno = error, -1; \
  static auto* real = failing::next<decltype(name)>(#name);    \
  return real(__VA_ARGS__)

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) noexcept {
  if (failing::fails(failing::kThread)) return EAGAIN;
  static auto* real = failing::next<decltype(pthread_create)>("pthread_create");
  return real(thread, attributes, body, argument);
}
void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  if (failing::fails(failing::kMap)) return errno = ENOMEM, MAP_FAILED;
  static auto* real = failing::next<decltype(mmap)>("mmap");
  return real(at, bytes, protection, flags, fd, offset);
}
int socket(int domain, int type, int protocol) noexcept {
  FAILING(kSocket, EMFILE, socket, domain, type, protocol);
}
int accept(int fd, sockaddr* address, socklen_t* size) {
  FAILING(kAccept, EMFILE, accept, fd, address, size);
}
int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  FAILING(kAccept, EMFILE, accept4, fd, address, size, flags);
}
int eventfd(unsigned count, int flags) noexcept { FAILING(kEventfd, EMFILE, eventfd, count, flags); }
int epoll_create1(int flags) noexcept { FAILING(kEpoll, EMFILE, epoll_create1, flags); }
int memfd_create(const char* name, unsigned flags) noexcept {
  FAILING(kMemfd, EMFILE, memfd_create, name, flags);
}

}  // extern "C"
