// A communicator as all layers see it, with a reference count. The handle inside belongs to the library. Each
// layer above keeps its own state behind a pointer.
#pragma once

#include "recorder.h"

typedef struct pynccl_watch pynccl_watch;

// Milliseconds of one slice of a wait. Python handles signals between two slices, and looks for the verdict
// of the watchdog.
enum pynccl_slice { PYNCCL_SLICE_MS = 100 };

// What the calls of one kind have added up to. The thread that is in the communicator writes it.
typedef struct pynccl_tally {
  uint64_t calls;
  uint64_t bytes;   // counts times item sizes
  uint64_t failed;  // how many of the calls the library refused, or failed while they waited
  uint64_t waited;  // ticks in calls that wait
} pynccl_tally;

// A stream with calls. The communicator numbers its calls: what a wait by another thread has completed is
// known apart from later calls. Entries are reused, and freed with the communicator, so that any thread may
// look.
typedef struct pynccl_used {
  struct pynccl_used* next;
  uintptr_t stream;
  uint64_t last;     // the number of the newest call
  uint64_t waited;   // the calls up to this number have completed, or their stream has ended
  uint64_t settled;  // the trace knows of the wait up to this number
} pynccl_used;

struct pynccl_comm {
  uintptr_t handle;  // 0: closed or failed
  int references;    // the owner's, and one for each list
  int rank;
  int size;
  int waits;                           // calls without a stream block: the CPU library
  int revoked;                         // by this rank
  uintptr_t stream;                    // of calls without a stream
  uintptr_t busy;                      // identifies the thread that is in a call; 0: none
  uintptr_t reserved;                  // identifies the only thread that may enter; 0: any
  pynccl_trace* trace;                 // NULL: nothing is recorded
  pynccl_watch* watch;                 // NULL without a time-out
  void (*unwatch)(pynccl_comm* comm);  // frees the watch, with the last reference
  pynccl_used* used;
  uint64_t issued;        // the number of the newest call on any stream
  int unlisted;           // 1 after a stream found no memory for its entry
  pynccl_tally* tallies;  // by kind; the runs of groups and plans of several calls under PYNCCL_PLAN
};

pynccl_comm* pynccl_comm_new(void);
void pynccl_comm_release(pynccl_comm* comm);
// A call was issued on the stream; the thread in the communicator says so.
void pynccl_comm_use(pynccl_comm* comm, uintptr_t stream);
// The number of the newest call on the stream that nobody has waited for; 0: none. Any thread may ask.
uint64_t pynccl_comm_newest(const pynccl_comm* comm, uintptr_t stream);
// Someone has waited for the stream's calls up to this number; any thread may say so.
void pynccl_comm_waited(pynccl_comm* comm, uintptr_t stream, uint64_t number);
// Complete the records of calls that someone has waited for.
void pynccl_comm_settle(pynccl_comm* comm);
// All calls on the stream are complete, or have failed.
void pynccl_comm_forget(pynccl_comm* comm, uintptr_t stream);
// The stream does not exist any more: what has become of its calls is unknown.
void pynccl_comm_abandon(pynccl_comm* comm, uintptr_t stream);
void pynccl_comm_failed(pynccl_comm* comm, uintptr_t stream, int result);
// The position of the next call's record.
uint64_t pynccl_comm_position(const pynccl_comm* comm);
