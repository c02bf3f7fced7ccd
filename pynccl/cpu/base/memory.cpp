#include "base/memory.hpp"

#include <cstdlib>
#include <new>

namespace {
thread_local size_t t_failed = 0;
}

namespace pncpu {
size_t failed_allocation() { return t_failed; }
void note_failed_allocation(size_t bytes) { t_failed = bytes; }
}  // namespace pncpu

// The library's operator new remembers the size that failed, for messages. Weak: a program that compiles
// these sources may define its own.
__attribute__((weak)) void* operator new(size_t bytes) {
  if (void* memory = malloc(bytes ? bytes : 1)) return memory;
  t_failed = bytes;
  throw std::bad_alloc();
}
__attribute__((weak)) void operator delete(void* memory) noexcept { free(memory); }
__attribute__((weak)) void operator delete(void* memory, size_t) noexcept { free(memory); }
