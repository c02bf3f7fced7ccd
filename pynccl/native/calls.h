// The path of every array call: one struct a call, run at once, or recorded in a list that runs as one group.
// Included before calls.c and, as it stands, by cffi: no preprocessor conditionals, integers for pointers.

enum pynccl_kind {
  PYNCCL_ALL_REDUCE,
  PYNCCL_REDUCE,
  PYNCCL_BROADCAST,
  PYNCCL_ALL_GATHER,
  PYNCCL_REDUCE_SCATTER,
  PYNCCL_ALL_TO_ALL,
  PYNCCL_GATHER,
  PYNCCL_SCATTER,
  PYNCCL_SEND,
  PYNCCL_RECV,
  PYNCCL_BARRIER  // an all_reduce of one byte
};

// Answers beside NCCL's result codes and the tables' 1000 and 1001.
enum pynccl_answer {
  PYNCCL_RECORDED = 1002,  // not run: it is in the list that this thread records
  PYNCCL_WAITING = 1003,   // issued, not complete; the communicators stay entered until pynccl_leave
  PYNCCL_BUSY = 1004,      // another thread is using a communicator
  PYNCCL_CLOSED = 1005,    // a communicator was destroyed, aborted, or belongs to another process
  PYNCCL_OVERLAP = 1006,   // the buffers overlap in a way that NCCL forbids
  PYNCCL_NO_MEMORY = 1007,
  PYNCCL_STOPPED = 1008,     // by a signal, while the ranks compared the call
  PYNCCL_INTERRUPTED = 1009  // what a prepared call is told when waiting for its end has raised
};

struct pynccl_watch;

typedef struct pynccl_comm {
  uintptr_t handle;  // 0 once closed, or in trouble
  int references;    // of its owner and of lists
  int rank;
  int size;
  int waits;                   // calls without a stream return when they are done: the CPU library's
  uintptr_t stream;            // of calls without one
  uintptr_t busy;              // what stands for the thread that is in a call, or 0
  pynccl_trace* trace;         // the recorder's, or NULL
  struct pynccl_watch* watch;  // NULL without a time-out
  // Streams with work since pynccl_comm_forget.
  int used_count;
  int used_capacity;
  uintptr_t* used;
} pynccl_comm;

typedef struct pynccl_call {
  pynccl_comm* comm;
  int kind;
  int datatype;
  int op;
  int root;  // or the peer
  uintptr_t send;
  uintptr_t recv;
  size_t count;
  uintptr_t stream;
  const ncclCollConfig_t* config;
  unsigned caller;  // of pynccl_trace_intern
} pynccl_call;

// One communicator and stream of a list.
typedef struct pynccl_use {
  pynccl_comm* comm;
  uintptr_t stream;
  int wait;         // the call returns when the stream is done
  int first;        // of this communicator
  uint64_t traced;  // the first record of the newest run
  pynccl_digest* digest;
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
} pynccl_list;

int pynccl_group_depth(void);
int pynccl_is_recording(void);

pynccl_comm* pynccl_comm_new(void);
void pynccl_comm_release(pynccl_comm* comm);
// All that was called on the stream is done, or has failed.
void pynccl_comm_forget(pynccl_comm* comm, uintptr_t stream);
void pynccl_comm_failed(pynccl_comm* comm, uintptr_t stream, int result);
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
pynccl_list* pynccl_record(pynccl_list* list);
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
