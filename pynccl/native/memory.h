// Memory from ncclMemAlloc that any thread may free at any time. A finalizer may, so nothing waits for a
// lock.
#pragma once

#include <stdint.h>

typedef struct pynccl_memory pynccl_memory;

// Memory that was allocated on the current device; NULL: there is no memory for this record.
pynccl_memory* pynccl_memory_at(uintptr_t begin, int on_gpu);
// Free it now, or in a later call if the device cannot complete its work now. A forked child frees nothing of
// its parent's.
void pynccl_memory_free(pynccl_memory* memory);
// Free what could not be freed before.
void pynccl_memory_free_unwanted(void);
