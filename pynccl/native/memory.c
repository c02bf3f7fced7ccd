#include "memory.h"

#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

struct pynccl_memory {
  pynccl_memory* next;
  uintptr_t begin, context;  // context 0: host memory of the CPU library
  pid_t process;
};

static pynccl_memory* unwanted;

pynccl_memory* pynccl_memory_at(uintptr_t begin, int on_gpu) {
  pynccl_memory* memory = malloc(sizeof *memory);
  if (!memory) return NULL;
  *memory = (pynccl_memory){.begin = begin, .process = getpid()};
  if (!on_gpu || cuCtxGetCurrent(&memory->context)) memory->context = 0;
  return memory;
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

static void add_unwanted(pynccl_memory* memory) {
  memory->next = __atomic_load_n(&unwanted, __ATOMIC_RELAXED);
  while (
      !__atomic_compare_exchange_n(&unwanted, &memory->next, memory, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

void pynccl_memory_free_unwanted(void) {
  pynccl_memory* next = __atomic_exchange_n(&unwanted, NULL, __ATOMIC_ACQUIRE);
  while (next) {
    pynccl_memory* memory = next;
    next = memory->next;
    const int own = memory->process == getpid();
    if (own && !complete(memory->context)) {
      // For example while the device captures a graph.
      add_unwanted(memory);
      continue;
    }
    // An address that the library does not know may be another allocation's by the next time.
    if (own) ncclMemFree(memory->begin);
    free(memory);
  }
}

void pynccl_memory_free(pynccl_memory* memory) {
  add_unwanted(memory);
  pynccl_memory_free_unwanted();
}
