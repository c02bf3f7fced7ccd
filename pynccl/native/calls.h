// The path of every array call: one struct a call, run at once, or recorded in a list that runs as one group.
#pragma once

#include "comm.h"

// One communicator and stream of a list.
typedef struct pynccl_use {
  pynccl_comm* comm;
  uintptr_t stream;
  int wait;         // the call returns when the stream is done
  int first;        // of this communicator
  uint64_t traced;  // the first record of the newest run
  struct pynccl_digest* digest;
} pynccl_use;

typedef struct pynccl_list {
  int count;
  int capacity;
  pynccl_call* calls;
  int use_count;
  int use_capacity;
  pynccl_use* uses;
  int grouped;  // a group even of one call
  int failed;   // the call that failed, -1 where it was the group itself
  int digested;
  // While a thread records in it: the list that it recorded in before, and objects that the calls need.
  int open;
  struct pynccl_list* outer;
  int kept_count;
  int kept_capacity;
  void** kept;
} pynccl_list;

// Whether what this thread calls is issued later: in a raw group of NCCL's, or because it is recorded.
int pynccl_group_depth(void);
int pynccl_is_recording(void);

int pynccl_enter(pynccl_comm* comm);
// The same for one in trouble: it can still be shrunk and closed.
int pynccl_enter_anyway(pynccl_comm* comm);
void pynccl_leave(pynccl_comm* comm);
// Python handles signals as soon as a function has returned, before it has the answer. What was entered in it
// is left with these: 1 where this thread had been in.
int pynccl_leave_mine(pynccl_comm* comm);
int pynccl_list_leave_mine(pynccl_list* list);

// Issue a call as a template has it, but for the buffers and the stream. `wait` (a host array without a
// stream): return when the result is there, or PYNCCL_WAITING after a while. The short form is for no stream.
int pynccl_issue(const pynccl_call* like, uintptr_t send, uintptr_t recv, size_t count, uintptr_t stream,
                 int wait);
int pynccl_issue_usual(const pynccl_call* like, uintptr_t send, uintptr_t recv, size_t count);

pynccl_list* pynccl_list_new(void);
void pynccl_list_free(pynccl_list* list);
int pynccl_list_extend(pynccl_list* list, const pynccl_list* more);
// The list will not change any more, but for its stream: a run becomes one record.
void pynccl_list_digest(pynccl_list* list);
int pynccl_list_set_stream(pynccl_list* list, uintptr_t stream);
int pynccl_list_run(pynccl_list* list);
void pynccl_list_clear(pynccl_list* list);
// Run a list, and empty it where all is done.
int pynccl_list_run_recorded(pynccl_list* list);
int pynccl_list_simulate(pynccl_list* list, ncclSimInfo_t* estimate);
void pynccl_list_leave(pynccl_list* list);
