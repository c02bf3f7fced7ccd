// What every layer uses: the libraries' functions, the clock, text that is built up, arrays that grow.
// Layers, from below: status, shim, library, internal, memory, segments, scan, kinds, names, call,
// recorder, ring, dumps, comm, signals, watch, frames, lines, channel, markers, verdicts, checks, arrivals,
// watchdog, recording, calls, python, open, fastcall, usual, hinting, module. A file includes only what is
// below it; library.h and library.c are generated.
#pragma once

#include "library.h"

#define MS 1000000LL

#pragma GCC visibility push(hidden)

// Nanoseconds of the monotonic clock.
int64_t pynccl_now(void);
// Append to a text.
void pynccl_say(char* text, size_t size, const char* format, ...) __attribute__((format(printf, 3, 4)));
// Append the ranks from `first` to `end`, which is not one of them: "3", or "3-5".
void pynccl_say_ranks(char* text, size_t size, int first, int end);
// An array with room for one more item. Without memory it returns NULL and leaves the array unchanged.
void* pynccl_grown(void* items, int* capacity, size_t size);

static inline void* pynccl_room(void* items, int count, int* capacity, size_t size) {
  return count < *capacity ? items : pynccl_grown(items, capacity, size);
}

#pragma GCC visibility pop
