#include "segments.h"

#include <pthread.h>
#include <unistd.h>

#include "internal.h"

#define EXPORTED __attribute__((visibility("default")))

typedef struct {
  uintptr_t begin;
  size_t bytes;
  uintptr_t context;  // 0: host memory of the CPU library
  pid_t process;      // a forked child must not free its parent's memory
  int pins, freed;
} Segment;

static struct {
  pthread_mutex_t lock;
  Segment* items;
  int count, capacity;
} segments = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int add(Segment segment) {
  pthread_mutex_lock(&segments.lock);
  Segment* items = pynccl_room(segments.items, segments.count, &segments.capacity, sizeof *items);
  if (items) {
    segments.items = items;
    items[segments.count++] = segment;
  }
  pthread_mutex_unlock(&segments.lock);
  return items != NULL;
}

static Segment* find(uintptr_t begin) {
  for (int i = 0; i < segments.count; ++i)
    if (segments.items[i].begin == begin) return &segments.items[i];
  return NULL;
}

static int take_unused(Segment* out) {
  int found = 0;
  pthread_mutex_lock(&segments.lock);
  for (int i = 0; i < segments.count && !found; ++i) {
    const Segment* s = &segments.items[i];
    found = s->freed && !s->pins && s->process == getpid();
    if (found) {
      *out = *s;
      segments.items[i] = segments.items[--segments.count];
    }
  }
  pthread_mutex_unlock(&segments.lock);
  return found;
}

// ncclMemFree unmaps memory that kernels still use (NCCL's src/allocator.cc, ncclCuMemFree). The wait must
// not end another thread's capture, so the thread relaxes its capture mode.
static int complete(uintptr_t context) {
  if (!context) return 1;
  int mode = 2;
  cuThreadExchangeStreamCaptureMode(&mode);
  int done = 0;
  if (!cuCtxPushCurrent_v2(context)) {
    done = !cuCtxSynchronize();
    uintptr_t popped;
    cuCtxPopCurrent_v2(&popped);
  }
  cuThreadExchangeStreamCaptureMode(&mode);
  return done;
}

static void free_unused(void) {
  Segment segment;
  while (take_unused(&segment)) {
    if (!complete(segment.context)) {
      // For example while the device captures a graph: the next call tries again.
      add(segment);
      return;
    }
    ncclMemFree(segment.begin);
  }
}

// torch's types: void*(ssize_t, int, cudaStream_t) and void(void*, size_t, int, cudaStream_t).
EXPORTED void* pynccl_segment_allocate(ptrdiff_t bytes, int device, void* stream);
EXPORTED void pynccl_segment_free(void* begin, size_t bytes, int device, void* stream);

void* pynccl_segment_allocate(ptrdiff_t bytes, int device, void* stream) {
  (void)device, (void)stream;  // torch has made the device current
  free_unused();
  Segment segment = {.bytes = bytes > 0 ? (size_t)bytes : 0, .process = getpid()};
  if (!segment.bytes || cuCtxGetCurrent(&segment.context)) segment.context = 0;
  if (!segment.bytes || ncclMemAlloc(&segment.begin, segment.bytes)) return NULL;
  if (!add(segment)) {
    ncclMemFree(segment.begin);
    return NULL;
  }
  return (void*)segment.begin;
}

void pynccl_segment_free(void* begin, size_t bytes, int device, void* stream) {
  (void)bytes, (void)device, (void)stream;
  pthread_mutex_lock(&segments.lock);
  Segment* segment = find((uintptr_t)begin);
  if (segment) segment->freed = 1;
  pthread_mutex_unlock(&segments.lock);
  free_unused();
}

size_t pynccl_segment_pin(uintptr_t begin) {
  size_t bytes = 0;
  pthread_mutex_lock(&segments.lock);
  Segment* segment = find(begin);
  if (segment && !segment->freed) {
    ++segment->pins;
    bytes = segment->bytes;
  }
  pthread_mutex_unlock(&segments.lock);
  return bytes;
}

void pynccl_segment_unpin(uintptr_t begin) {
  pthread_mutex_lock(&segments.lock);
  Segment* segment = find(begin);
  if (segment && segment->pins) --segment->pins;
  pthread_mutex_unlock(&segments.lock);
  free_unused();
}

size_t pynccl_segment_bytes(void) {
  size_t bytes = 0;
  pthread_mutex_lock(&segments.lock);
  for (int i = 0; i < segments.count; ++i) bytes += segments.items[i].bytes;
  pthread_mutex_unlock(&segments.lock);
  return bytes;
}
