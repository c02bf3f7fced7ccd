#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int64_t pynccl_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 * MS + t.tv_nsec;
}

void pynccl_say(char* text, size_t size, const char* format, ...) {
  const size_t used = strlen(text);
  va_list args;
  va_start(args, format);
  vsnprintf(text + used, size - used, format, args);
  va_end(args);
}

void pynccl_say_ranks(char* text, size_t size, int first, int end) {
  pynccl_say(text, size, end == first + 1 ? "%d" : "%d-%d", first, end - 1);
}

void* pynccl_grown(void* items, int* capacity, size_t size) {
  const int more = *capacity ? 2 * *capacity : 8;
  void* grown = realloc(items, (size_t)more * size);
  if (grown) *capacity = more;
  return grown;
}
