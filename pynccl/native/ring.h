// The rings that the recorder writes and its dumps read: records, the plans that some records stand for, and
// the clock. The code that writes a record on every call is inline and sets the fields one by one: a compiler
// builds a whole struct in memory before it copies it.
#pragma once

#include <time.h>

#include "recorder.h"

enum pynccl_state {
  PYNCCL_CALLED,  // in the C call
  PYNCCL_TAKEN,   // the library has accepted it
  PYNCCL_DONE,    // known to be complete
  PYNCCL_FAILED
};

// One cache line.
typedef struct pynccl_entry {
  uint64_t called;   // in ticks
  uint64_t outcome;  // of pynccl_outcome; one word, so that a concurrent dump never sees half of it
  uintptr_t send;
  uintptr_t recv;
  uintptr_t stream;
  union {
    size_t count;
    const struct pynccl_digest* plan;  // the plan that this run stands for
  };
  uint32_t number;  // counts collectives of the communicator, or sends or recvs with the peer; of a plan's
                    // run, its first collective; the low half, see pynccl_whole; of a one-sided call, the op
  uint32_t group;   // 0: none
  int root;
  uint16_t caller;
  uint8_t kind;
  uint8_t datatype_op;  // op in the upper four bits
} pynccl_entry;

_Static_assert(sizeof(pynccl_entry) == 64, "a record is a cache line");
_Static_assert(ncclNumOps < 16 && ncclNumTypes <= 16, "op and datatype have four bits");

static inline uint64_t pynccl_outcome(enum pynccl_state state, int64_t ticks_or_result) {
  return (uint64_t)ticks_or_result << 2 | state;
}

static inline void pynccl_set_outcome(pynccl_entry* r, enum pynccl_state state, int64_t ticks_or_result) {
  __atomic_store_n(&r->outcome, pynccl_outcome(state, ticks_or_result), __ATOMIC_RELAXED);
}

static inline enum pynccl_state pynccl_state_of(const pynccl_entry* r) { return r->outcome & 3; }

// The whole number from its low half in a record and the newest number of its kind.
static inline uint64_t pynccl_whole(uint64_t newest, uint32_t low) {
  return newest - (uint32_t)((uint32_t)newest - low);
}

// The calls of a plan on one communicator. It lives until no record refers to it, even if its list is gone.
typedef struct pynccl_digest {
  struct pynccl_digest* next;
  uint64_t last;  // the position after its newest run
  int dropped;
  int count;
  int collectives;
  uintptr_t stream;  // the stream of all calls; UINTPTR_MAX: they have several
  pynccl_call calls[];
} pynccl_digest;

// The algorithms of a kind of call, each up to `most` bytes. The first name is published last; NULL: unknown.
typedef struct pynccl_algorithms {
  struct {
    const char* name;
    size_t most;
  } by_size[4];
} pynccl_algorithms;

struct pynccl_trace {
  uint64_t next;  // number of records so far; published last
  size_t mask;    // turns a position into an index: a power of two, less one
  size_t shown;   // how many records a dump shows; never the oldest slot, which a thread may be writing
  pynccl_entry* records;
  uint64_t collectives;
  unsigned caller;
  int size;
  uint64_t* pairs;    // counts calls with each peer: sends, then recvs
  uint64_t* scratch;  // the same counters for a dump
  int mark;
  uint64_t marked;
  uint64_t revoked;  // in ticks; 0: it was not
  uint64_t closed;   // 0: open; else a number that grows with every closed ring
  pynccl_digest* digests;
  pynccl_algorithms algorithms[PYNCCL_SEND];  // of the collectives, by kind
  char header[];
};

static inline uint64_t pynccl_ticks(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
#endif
}

typedef struct pynccl_instant {
  uint64_t ticks;
  int64_t ns;  // since 1970
} pynccl_instant;

// Nodes are never freed, so that a dump walks them without a lock.
typedef struct pynccl_node {
  struct pynccl_node* next;
  pynccl_trace* trace;
} pynccl_node;

#pragma GCC visibility push(hidden)

extern pynccl_instant pynccl_first;  // both clocks, read when the first communicator was made
extern pynccl_node* pynccl_nodes;
extern int pynccl_trace_busy;  // a lock: a thread is changing nodes or digests
extern int pynccl_dumping;     // a lock: a dump is running; nothing is freed meanwhile

#define PYNCCL_CALLERS 65536
extern const char* pynccl_callers[PYNCCL_CALLERS];

pynccl_instant pynccl_clock(void);
void pynccl_trace_start_clock(void);
int pynccl_no_dump(void);
void pynccl_trace_close(pynccl_trace* t);
// All calls on the stream before the position `end` are complete, or have failed with `result`.
void pynccl_trace_complete(pynccl_trace* t, uintptr_t stream, uint64_t end, int result);

// Give a ring the calls that a plan's runs stand for. The ring keeps them until no record refers to them.
void pynccl_digest_add(pynccl_trace* t, pynccl_digest* digest);
void pynccl_digest_drop(pynccl_trace* t, pynccl_digest* digest);
void pynccl_trace_plan(pynccl_trace* t, pynccl_digest* plan, uint64_t now, uint64_t group);

#pragma GCC visibility pop

static inline int pynccl_is_pair(int kind) { return kind == PYNCCL_SEND || kind == PYNCCL_RECV; }

static inline int pynccl_is_one_sided(int kind) {
  return kind >= PYNCCL_PUT_SIGNAL && kind <= PYNCCL_WAIT_SIGNAL;
}

// Calls that every rank makes in the same order.
static inline int pynccl_is_collective(int kind) {
  return (kind < PYNCCL_PLAN && !pynccl_is_pair(kind) && !pynccl_is_one_sided(kind)) ||
         kind == PYNCCL_SPLIT || kind == PYNCCL_GROW;
}

static inline uint64_t* pynccl_pair(const pynccl_trace* t, uint64_t* pairs, int kind, int peer) {
  return &pairs[(kind == PYNCCL_SEND ? 0 : t->size) + peer];
}

static inline pynccl_entry* pynccl_trace_next(pynccl_trace* t) {
  // Earlier records are visible before this one overwrites the oldest.
  __atomic_thread_fence(__ATOMIC_RELEASE);
  return &t->records[t->next & t->mask];
}

static inline void pynccl_trace_publish(pynccl_trace* t) {
  const uint64_t next = t->next + 1;
  // The next record is rarely in the first-level cache: the ring is larger, and calls are far apart.
  __builtin_prefetch(&t->records[next & t->mask], 1);
  __atomic_store_n(&t->next, next, __ATOMIC_RELEASE);
}

static inline void pynccl_put_call(pynccl_entry* r, const pynccl_call* c, uint64_t called, uint64_t number,
                                   uint64_t group) {
  r->called = called;
  r->outcome = 0;
  r->send = c->send;
  r->recv = c->recv;
  r->stream = c->stream;
  r->count = c->count;
  r->number = (uint32_t)number;
  r->group = (uint32_t)group;
  r->root = c->root;
  r->caller = (uint16_t)c->caller;
  r->kind = (uint8_t)c->kind;
  r->datatype_op = (uint8_t)(c->datatype | (c->op < ncclNumOps ? c->op : ncclNumOps) << 4);
}

static inline pynccl_entry* pynccl_trace_call(pynccl_trace* t, const pynccl_call* c, uint64_t now,
                                              uint64_t group) {
  uint64_t* counter = pynccl_is_pair(c->kind) ? pynccl_pair(t, t->pairs, c->kind, c->root) : &t->collectives;
  const uint64_t number = pynccl_is_one_sided(c->kind) ? (uint64_t)c->op : ++*counter;
  pynccl_entry* record = pynccl_trace_next(t);
  pynccl_put_call(record, c, now, number, group);
  pynccl_trace_publish(t);
  return record;
}

// `end`: in ticks, if the call has been waited for; else 0.
static inline void pynccl_trace_result(pynccl_entry* record, int result, uint64_t end) {
  if (result && result != PYNCCL_WAITING && result != ncclInProgress)
    pynccl_set_outcome(record, PYNCCL_FAILED, result);
  else if (result || !end)
    pynccl_set_outcome(record, PYNCCL_TAKEN, result == PYNCCL_WAITING ? 0 : result);
  else
    pynccl_set_outcome(record, PYNCCL_DONE, (int64_t)end);
}

static inline pynccl_entry* pynccl_trace_at(const pynccl_trace* t, uint64_t position) {
  return &t->records[position & t->mask];
}

static inline uint64_t pynccl_trace_oldest(const pynccl_trace* t, uint64_t next) {
  return next < t->shown ? 0 : next - t->shown;
}

// Copy a record; 0 if a thread overwrote it meanwhile.
static inline int pynccl_trace_copy(const pynccl_trace* t, uint64_t position, pynccl_entry* copy) {
  *copy = *pynccl_trace_at(t, position);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return position >= pynccl_trace_oldest(t, __atomic_load_n(&t->next, __ATOMIC_ACQUIRE));
}
