// A communicator as all layers see it, with a reference count. The handle inside belongs to the library. Each
// layer above keeps its own state behind a pointer.
#pragma once

#include "recorder.h"

typedef struct pynccl_watch pynccl_watch;

// What the calls of one kind have added up to. The thread that is in the communicator writes it.
typedef struct pynccl_tally {
  uint64_t calls;
  uint64_t bytes;   // counts times item sizes
  uint64_t failed;  // how many of the calls the library refused, or failed while they waited
  uint64_t waited;  // ticks in calls that wait
} pynccl_tally;

struct pynccl_comm {
  uintptr_t handle;  // 0: closed or failed
  int references;    // the owner's, and one for each list
  int rank;
  int size;
  int waits;                           // calls without a stream block: the CPU library
  uintptr_t stream;                    // of calls without a stream
  uintptr_t busy;                      // identifies the thread that is in a call; 0: none
  pynccl_trace* trace;                 // NULL: nothing is recorded
  pynccl_watch* watch;                 // NULL without a time-out
  void (*unwatch)(pynccl_comm* comm);  // frees the watch, with the last reference
  // Streams with work since the last pynccl_comm_forget.
  int used_count;
  int used_capacity;
  uintptr_t* used;
  pynccl_tally* tallies;  // by kind; the runs of groups and plans of several calls under PYNCCL_PLAN
};

pynccl_comm* pynccl_comm_new(void);
void pynccl_comm_release(pynccl_comm* comm);
// All calls on the stream are complete, or have failed.
void pynccl_comm_forget(pynccl_comm* comm, uintptr_t stream);
// The stream does not exist any more: what has become of its calls is unknown.
void pynccl_comm_abandon(pynccl_comm* comm, uintptr_t stream);
void pynccl_comm_failed(pynccl_comm* comm, uintptr_t stream, int result);
// The position of the next call's record.
uint64_t pynccl_comm_position(const pynccl_comm* comm);
