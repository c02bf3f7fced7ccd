#include "segments.h"

#include <pthread.h>
#include <stdlib.h>

#include "internal.h"
#include "memory.h"

#define EXPORTED __attribute__((visibility("default")))

typedef struct {
  uintptr_t begin;
  size_t bytes;
  pynccl_memory* memory;
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

static pynccl_memory* take_unused(void) {
  pynccl_memory* found = NULL;
  pthread_mutex_lock(&segments.lock);
  for (int i = 0; i < segments.count && !found; ++i) {
    const Segment* s = &segments.items[i];
    if (!s->freed || s->pins) continue;
    found = s->memory;
    segments.items[i] = segments.items[--segments.count];
  }
  pthread_mutex_unlock(&segments.lock);
  return found;
}

static void free_unused(void) {
  pynccl_memory_free_unwanted();
  for (pynccl_memory* memory; (memory = take_unused());) pynccl_memory_free(memory);
}

// torch's types: void*(ssize_t, int, cudaStream_t) and void(void*, size_t, int, cudaStream_t).
EXPORTED void* pynccl_segment_allocate(ptrdiff_t bytes, int device, void* stream);
EXPORTED void pynccl_segment_free(void* begin, size_t bytes, int device, void* stream);

void* pynccl_segment_allocate(ptrdiff_t bytes, int device, void* stream) {
  (void)device, (void)stream;  // torch has made the device current
  free_unused();
  uintptr_t begin;
  if (bytes <= 0 || ncclMemAlloc(&begin, (size_t)bytes)) return NULL;
  pynccl_memory* memory = pynccl_memory_at(begin, 1);
  if (memory && add((Segment){.begin = begin, .bytes = (size_t)bytes, .memory = memory})) return (void*)begin;
  free(memory);
  ncclMemFree(begin);
  return NULL;
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
