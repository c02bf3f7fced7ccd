// What all layers know of a communicator, counted by references. The handle inside is the library's; each
// layer above keeps its own part behind a pointer.
#pragma once

#include "recorder.h"

typedef struct pynccl_watch pynccl_watch;

struct pynccl_comm {
  uintptr_t handle;  // 0 once closed, or in trouble
  int references;    // of its owner and of lists
  int rank;
  int size;
  int waits;                           // calls without a stream return when they are done: the CPU library's
  uintptr_t stream;                    // of calls without one
  uintptr_t busy;                      // what stands for the thread that is in a call, or 0
  pynccl_trace* trace;                 // the recorder's, or NULL
  pynccl_watch* watch;                 // NULL without a time-out
  void (*unwatch)(pynccl_comm* comm);  // frees the watch, with the last reference
  // Streams with work since pynccl_comm_forget.
  int used_count;
  int used_capacity;
  uintptr_t* used;
};

pynccl_comm* pynccl_comm_new(void);
void pynccl_comm_release(pynccl_comm* comm);
// All that was called on the stream is done, or has failed.
void pynccl_comm_forget(pynccl_comm* comm, uintptr_t stream);
void pynccl_comm_failed(pynccl_comm* comm, uintptr_t stream, int result);
