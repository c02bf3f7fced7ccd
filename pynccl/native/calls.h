// The path of every array call. A call is one struct; it runs immediately, or is recorded in a list that runs
// as one group.
#pragma once

#include "comm.h"

// One communicator and stream of a list.
typedef struct pynccl_use {
  pynccl_comm* comm;
  uintptr_t stream;
  int wait;         // the call returns when the stream is done
  int first;        // the communicator's first entry in the list
  uint64_t traced;  // the first record of the newest run
  struct pynccl_digest* digest;
} pynccl_use;

// What a list's calls of one kind on one communicator add up to, for the tallies.
typedef struct pynccl_sum {
  pynccl_comm* comm;
  int kind;
  uint64_t calls;
  uint64_t bytes;
} pynccl_sum;

typedef struct pynccl_list {
  int count;
  int capacity;
  pynccl_call* calls;
  int use_count;
  int use_capacity;
  pynccl_use* uses;
  int sum_count;
  int sum_capacity;
  pynccl_sum* sums;
  int grouped;  // runs as a group even if it has one call
  int failed;   // the index of the call that failed; -1: the group itself failed
  int digested;
  // While a thread records in it: the thread's outer list, and the objects that the calls need.
  int open;
  struct pynccl_list* outer;
  int kept_count;
  int kept_capacity;
  void** kept;
} pynccl_list;

// Whether this thread's calls are issued later: inside ncclGroupStart, or because they are recorded.
int pynccl_group_depth(void);
int pynccl_is_recording(void);

int pynccl_enter(pynccl_comm* comm);
// The same for a communicator that has failed: it can still be shrunk and closed.
int pynccl_enter_anyway(pynccl_comm* comm);
void pynccl_leave(pynccl_comm* comm);
// Let only this thread enter, unless another one is in, or has reserved it.
int pynccl_reserve(pynccl_comm* comm);
// Python runs signal handlers as soon as a function has returned, before it stores the result. If a handler
// raises, these leave what the function had entered. They return 1 if this thread had entered.
int pynccl_leave_mine(pynccl_comm* comm);
int pynccl_list_leave_mine(pynccl_list* list);

// The calls on a stream are complete that were recorded up to a position.
void pynccl_comm_reached(pynccl_comm* comm, uintptr_t stream, uint64_t position);

// Issue a copy of a template with these buffers and this stream. `wait` (a host array without a stream):
// return when the call is complete, or PYNCCL_WAITING after PYNCCL_SLICE_MS. The short form uses the
// communicator's default stream.
int pynccl_issue(const pynccl_call* like, uintptr_t send, uintptr_t recv, size_t count, uintptr_t stream,
                 int wait);
int pynccl_issue_usual(const pynccl_call* like, uintptr_t send, uintptr_t recv, size_t count);

pynccl_list* pynccl_list_new(void);
void pynccl_list_free(pynccl_list* list);
int pynccl_list_extend(pynccl_list* list, const pynccl_list* more);
// Declare that the list no longer changes except for its stream: the recorder keeps one record for each run.
void pynccl_list_digest(pynccl_list* list);
int pynccl_list_set_stream(pynccl_list* list, uintptr_t stream);
// `may_wait` is 0: return without waiting, where the list's calls wait otherwise.
int pynccl_list_run(pynccl_list* list, int may_wait);
void pynccl_list_clear(pynccl_list* list);
// Run a list; empty it on success.
int pynccl_list_run_recorded(pynccl_list* list);
int pynccl_list_simulate(pynccl_list* list, ncclSimInfo_t* estimate);
void pynccl_list_leave(pynccl_list* list);
