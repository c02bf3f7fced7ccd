// Failures to inject into the library: this program's own operator new, pthread_create, mmap and calls that
// make descriptors, of which the k-th that the library makes from now on fails, or several from it on.
// Include it once a program.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "base/memory.hpp"

// ThreadSanitizer itself calls mmap before it can see calls.
#define UNSEEN __attribute__((no_sanitize("thread")))

namespace failing {

enum Kind { kNew, kThread, kMap, kSocket, kAccept, kEventfd, kEpoll, kMemfd, kKinds };
constexpr const char* kNames[] = {"operator new", "pthread_create", "mmap",          "socket",
                                  "accept",       "eventfd",        "epoll_create1", "memfd_create"};

inline std::atomic<int> kind{kKinds};
inline std::atomic<long> left{0};   // calls of that kind until the first that fails
inline std::atomic<long> count{1};  // that fail
inline std::atomic<bool> fired{false};
// Bytes that operator new still gives this thread, until it has failed once; negative: without limit.
inline thread_local long allowance = -1;

// The test's own code must not fail: a thread of the test says so, and takes it back inside the library.
inline thread_local bool exempt = false;

// Before this program's own constructors run, dlsym may not be there yet.
inline bool started = false;
__attribute__((constructor)) inline void start() { started = true; }

inline void arm(Kind which, long k, long several = 1) {
  fired = false;
  left = k;
  count = several;
  kind = which;
}
inline void disarm() { kind = kKinds; }

UNSEEN inline bool fails(Kind which) {
  if (exempt || kind.load(std::memory_order_relaxed) != which) return false;
  long now = left.fetch_sub(1);
  if (now > 0 || now <= -count) return false;
  return fired = true;
}

UNSEEN inline bool over_allowance(size_t bytes) {
  if (allowance < 0) return false;
  bool over = size_t(allowance) < bytes;
  allowance = over ? -1 : allowance - long(bytes);
  return over;
}

UNSEEN inline void* allocate(size_t bytes, size_t alignment = 0) {
  if (fails(kNew) || over_allowance(bytes)) return pncpu::note_failed_allocation(bytes), nullptr;
  if (!alignment) return malloc(bytes ? bytes : 1);
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

UNSEEN inline void* must(void* p) {
  if (!p) throw std::bad_alloc();
  return p;
}

template <class F>
UNSEEN F* next(F** real, const char* name) {
  if (!*real) *real = reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
  return *real;
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

// Out of line: inlined, GCC takes free() for the wrong end of what its operator new gave.
#define OUT_OF_LINE __attribute__((noinline))
OUT_OF_LINE void* operator new(size_t n) { return failing::must(failing::allocate(n)); }
OUT_OF_LINE void* operator new[](size_t n) { return failing::must(failing::allocate(n)); }
OUT_OF_LINE void* operator new(size_t n, const std::nothrow_t&) noexcept { return failing::allocate(n); }
OUT_OF_LINE void* operator new[](size_t n, const std::nothrow_t&) noexcept { return failing::allocate(n); }
OUT_OF_LINE void* operator new(size_t n, std::align_val_t a) {
  return failing::must(failing::allocate(n, size_t(a)));
}
OUT_OF_LINE void* operator new[](size_t n, std::align_val_t a) {
  return failing::must(failing::allocate(n, size_t(a)));
}
OUT_OF_LINE void operator delete(void* p) noexcept { free(p); }
OUT_OF_LINE void operator delete[](void* p) noexcept { free(p); }
OUT_OF_LINE void operator delete(void* p, size_t) noexcept { free(p); }
OUT_OF_LINE void operator delete[](void* p, size_t) noexcept { free(p); }
OUT_OF_LINE void operator delete(void* p, const std::nothrow_t&) noexcept { free(p); }
OUT_OF_LINE void operator delete[](void* p, const std::nothrow_t&) noexcept { free(p); }
OUT_OF_LINE void operator delete(void* p, std::align_val_t) noexcept { free(p); }
OUT_OF_LINE void operator delete[](void* p, std::align_val_t) noexcept { free(p); }
OUT_OF_LINE void operator delete(void* p, size_t, std::align_val_t) noexcept { free(p); }
OUT_OF_LINE void operator delete[](void* p, size_t, std::align_val_t) noexcept { free(p); }

#define REAL(name, ...)        \
  static decltype(name)* real; \
  return failing::next(&real, #name)(__VA_ARGS__)
#define FAILING(kind, error, name, ...)                        \
  if (failing::fails(failing::kind)) return errno = error, -1; \
  REAL(name, __VA_ARGS__)

extern "C" {

UNSEEN int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                          void* argument) noexcept {
  if (failing::fails(failing::kThread)) return EAGAIN;
  REAL(pthread_create, thread, attributes, body, argument);
}
UNSEEN void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  if (!failing::started)
    return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, fd, offset));
  if (failing::fails(failing::kMap)) return errno = ENOMEM, MAP_FAILED;
  REAL(mmap, at, bytes, protection, flags, fd, offset);
}
UNSEEN int socket(int domain, int type, int protocol) noexcept {
  FAILING(kSocket, EMFILE, socket, domain, type, protocol);
}
UNSEEN int accept(int fd, sockaddr* address, socklen_t* size) {
  FAILING(kAccept, EMFILE, accept, fd, address, size);
}
UNSEEN int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  FAILING(kAccept, EMFILE, accept4, fd, address, size, flags);
}
UNSEEN int eventfd(unsigned count, int flags) noexcept { FAILING(kEventfd, EMFILE, eventfd, count, flags); }
UNSEEN int epoll_create1(int flags) noexcept { FAILING(kEpoll, EMFILE, epoll_create1, flags); }
UNSEEN int memfd_create(const char* name, unsigned flags) noexcept {
  FAILING(kMemfd, EMFILE, memfd_create, name, flags);
}

}  // extern "C"
