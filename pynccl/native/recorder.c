// Included by the generated binding, behind calls.h and before calls.c, which writes the records.

#include <sched.h>
#include <stdlib.h>
#include <time.h>

enum pynccl_state {
  PYNCCL_CALLED,  // in the C call
  PYNCCL_TAKEN,   // the library has it
  PYNCCL_DONE,    // known to be complete
  PYNCCL_FAILED
};

// One line of the cache.
typedef struct pynccl_entry {
  uint64_t called;   // in ticks
  uint64_t outcome;  // of pynccl_outcome; one word, so that who dumps meanwhile sees all of it or nothing
  uintptr_t send;
  uintptr_t recv;
  uintptr_t stream;
  union {
    size_t count;
    const pynccl_digest* plan;  // what a run stands for
  };
  uint32_t number;  // of a collective on its communicator, of a send or recv with its peer; a run's first
                    // collective; the low half, see pynccl_whole
  uint32_t group;   // 0: none
  int root;
  uint16_t caller;
  uint8_t kind;
  uint8_t datatype_op;  // op in the upper four bits
} pynccl_entry;

_Static_assert(sizeof(pynccl_entry) == 64, "a record is a line of the cache");
_Static_assert(ncclNumOps < 16 && ncclNumTypes <= 16, "op and datatype have four bits");

static inline uint64_t pynccl_outcome(enum pynccl_state state, int64_t ticks_or_result) {
  return (uint64_t)ticks_or_result << 2 | state;
}

static inline void pynccl_set_outcome(pynccl_entry* r, enum pynccl_state state, int64_t ticks_or_result) {
  __atomic_store_n(&r->outcome, pynccl_outcome(state, ticks_or_result), __ATOMIC_RELAXED);
}

static inline enum pynccl_state pynccl_state_of(const pynccl_entry* r) { return r->outcome & 3; }

// A number of which a record has the low half, from the newest one of its kind.
static inline uint64_t pynccl_whole(uint64_t newest, uint32_t low) {
  return newest - (uint32_t)((uint32_t)newest - low);
}

// The calls of a plan on one communicator. It outlives its list until no record means it any more.
struct pynccl_digest {
  pynccl_digest* next;
  uint64_t last;  // the position behind its newest run
  int dropped;
  int count;
  int collectives;
  uintptr_t stream;  // of all calls, or what is no stream
  pynccl_call calls[];
};

struct pynccl_trace {
  uint64_t next;  // records so far; published last
  size_t mask;    // of a position, for its place: a power of two, less one
  size_t shown;   // at most; not the oldest place, which may be being written
  pynccl_entry* records;
  uint64_t collectives;
  unsigned caller;
  int size;
  uint64_t* pairs;    // calls with each peer so far: sends, then recvs
  uint64_t* scratch;  // a dump's, as many
  int mark;
  uint64_t marked;
  uint64_t closed;  // 0, or a number that grows with every one that is closed
  pynccl_digest* digests;
  char header[];
};

// --- the time
// -----------------------------------------------------------------------------------------------

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

static pynccl_instant pynccl_clock(void) {
  struct timespec now;
  const uint64_t before = pynccl_ticks();
  clock_gettime(CLOCK_REALTIME, &now);
  return (pynccl_instant){before + (pynccl_ticks() - before) / 2, now.tv_sec * 1000000000ll + now.tv_nsec};
}

static pynccl_instant pynccl_first;

static int64_t pynccl_ns(uint64_t ticks, pynccl_instant last) {
  const int64_t span = last.ticks - pynccl_first.ticks;
  if (span <= 0) return last.ns;
  return pynccl_first.ns +
         (__int128)(int64_t)(ticks - pynccl_first.ticks) * (last.ns - pynccl_first.ns) / span;
}

// --- all rings of the process
// -------------------------------------------------------------------------------

// Nodes are never freed, so that a dump walks them without a lock.
typedef struct pynccl_node {
  struct pynccl_node* next;
  pynccl_trace* trace;
} pynccl_node;

static pynccl_node* pynccl_nodes;
static int pynccl_trace_busy;  // nodes or digests are being changed
static int pynccl_dumping;     // a dump is under way: one at a time, and nothing is freed meanwhile
static int pynccl_kept;
static uint64_t pynccl_closed;

static void pynccl_trace_lock(void) {
  while (__atomic_exchange_n(&pynccl_trace_busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
}

static void pynccl_trace_unlock(void) { __atomic_store_n(&pynccl_trace_busy, 0, __ATOMIC_RELEASE); }

static int pynccl_no_dump(void) { return !__atomic_load_n(&pynccl_dumping, __ATOMIC_SEQ_CST); }

static void pynccl_trace_free(pynccl_trace* t) {
  while (t->digests) {
    pynccl_digest* digest = t->digests;
    t->digests = digest->next;
    free(digest);
  }
  free(t->records);
  free(t->pairs);
  free(t);
}

// Free rings of closed communicators, the oldest first.
static void pynccl_trace_sweep(void) {
  for (;;) {
    pynccl_node* oldest = NULL;
    int closed = 0;
    for (pynccl_node* node = pynccl_nodes; node; node = node->next) {
      if (!node->trace || !node->trace->closed) continue;
      ++closed;
      if (!oldest || node->trace->closed < oldest->trace->closed) oldest = node;
    }
    if (closed <= pynccl_kept) return;
    pynccl_trace* trace = oldest->trace;
    __atomic_store_n(&oldest->trace, NULL, __ATOMIC_SEQ_CST);
    if (!pynccl_no_dump()) {
      // It may be reading this one: later.
      __atomic_store_n(&oldest->trace, trace, __ATOMIC_SEQ_CST);
      return;
    }
    pynccl_trace_free(trace);
  }
}

static int pynccl_trace_enlist(pynccl_trace* trace) {
  pynccl_trace_lock();
  if (!pynccl_first.ticks) pynccl_first = pynccl_clock();
  pynccl_trace_sweep();
  pynccl_node* node = pynccl_nodes;
  while (node && node->trace) node = node->next;
  if (node) {
    __atomic_store_n(&node->trace, trace, __ATOMIC_SEQ_CST);
  } else if ((node = malloc(sizeof *node))) {
    *node = (pynccl_node){pynccl_nodes, trace};
    __atomic_store_n(&pynccl_nodes, node, __ATOMIC_SEQ_CST);
  }
  pynccl_trace_unlock();
  return node != NULL;
}

pynccl_trace* pynccl_trace_open(size_t records, int size, const char* header) {
  const size_t length = strlen(header) + 1;
  pynccl_trace* t = calloc(1, sizeof *t + length);
  if (!t) return NULL;
  t->shown = records;
  size_t slots = 2;
  while (slots <= records) slots *= 2;
  t->mask = slots - 1;
  t->size = size;
  t->records = aligned_alloc(sizeof *t->records, slots * sizeof *t->records);
  t->pairs = calloc(4 * (size_t)size, sizeof *t->pairs);
  t->scratch = t->pairs + 2 * (size_t)size;
  memcpy(t->header, header, length);
  if (t->records && t->pairs && pynccl_trace_enlist(t)) return t;
  pynccl_trace_free(t);
  return NULL;
}

static void pynccl_trace_close(pynccl_trace* t) {
  int listed = 0;
  pynccl_trace_lock();
  t->closed = ++pynccl_closed;
  for (pynccl_node* node = pynccl_nodes; node; node = node->next) listed |= node->trace == t;
  pynccl_trace_sweep();
  pynccl_trace_unlock();
  // The parent's, in a forked child.
  if (!listed) pynccl_trace_free(t);
}

void pynccl_trace_keep(int count) { pynccl_kept = count; }

// --- writing
// ------------------------------------------------------------------------------------------------

static inline int pynccl_is_pair(int kind) { return kind == PYNCCL_SEND || kind == PYNCCL_RECV; }

// Those that every rank makes in the same order.
static inline int pynccl_is_collective(int kind) {
  return (kind <= PYNCCL_BARRIER && !pynccl_is_pair(kind)) || kind == PYNCCL_SPLIT || kind == PYNCCL_GROW;
}

static inline uint64_t* pynccl_pair(const pynccl_trace* t, uint64_t* pairs, int kind, int peer) {
  return &pairs[(kind == PYNCCL_SEND ? 0 : t->size) + peer];
}

static inline pynccl_entry* pynccl_trace_next(pynccl_trace* t) {
  // What was published stays before what overwrites the oldest.
  __atomic_thread_fence(__ATOMIC_RELEASE);
  return &t->records[t->next & t->mask];
}

static inline void pynccl_trace_publish(pynccl_trace* t) {
  const uint64_t next = t->next + 1;
  // The ring is larger than the nearest cache, and calls are far apart.
  __builtin_prefetch(&t->records[next & t->mask], 1);
  __atomic_store_n(&t->next, next, __ATOMIC_RELEASE);
}

// Field by field: a copy of the whole would be put together in memory first.
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
  pynccl_entry* record = pynccl_trace_next(t);
  pynccl_put_call(record, c, now, ++*counter, group);
  pynccl_trace_publish(t);
  return record;
}

static inline void pynccl_trace_result(pynccl_entry* record, int result, int waited) {
  if (result && result != PYNCCL_WAITING && result != ncclInProgress)
    pynccl_set_outcome(record, PYNCCL_FAILED, result);
  else if (result || !waited)
    pynccl_set_outcome(record, PYNCCL_TAKEN, result == PYNCCL_WAITING ? 0 : result);
  else
    pynccl_set_outcome(record, PYNCCL_DONE, pynccl_ticks());
}

static pynccl_entry* pynccl_trace_at(const pynccl_trace* t, uint64_t position) {
  return &t->records[position & t->mask];
}

static uint64_t pynccl_trace_oldest(const pynccl_trace* t, uint64_t next) {
  return next < t->shown ? 0 : next - t->shown;
}

// The stream has got behind everything that was called on it, or has failed to.
static void pynccl_trace_complete(pynccl_trace* t, uintptr_t stream, int result) {
  const uint64_t now = pynccl_ticks(), oldest = pynccl_trace_oldest(t, t->next);
  for (uint64_t i = t->next; i-- > oldest;) {
    pynccl_entry* record = pynccl_trace_at(t, i);
    if (record->stream != stream || record->kind > PYNCCL_PLAN) continue;
    const enum pynccl_state state = pynccl_state_of(record);
    if (state == PYNCCL_DONE) break;
    if (state == PYNCCL_FAILED) continue;
    if (result)
      pynccl_set_outcome(record, PYNCCL_FAILED, result);
    else
      pynccl_set_outcome(record, PYNCCL_DONE, now);
  }
}

uint64_t pynccl_trace_begin(pynccl_trace* t, int kind, int detail) {
  if (!t) return 0;
  pynccl_entry* record = pynccl_trace_next(t);
  *record = (pynccl_entry){.called = pynccl_ticks(), .root = detail, .caller = t->caller, .kind = kind};
  if (pynccl_is_collective(kind)) record->number = (uint32_t)++t->collectives;
  pynccl_trace_publish(t);
  return t->next;
}

void pynccl_trace_end(pynccl_trace* t, uint64_t token, int result) {
  if (t && token) pynccl_trace_result(pynccl_trace_at(t, token - 1), result, 1);
}

void pynccl_trace_mark(pynccl_trace* t, int kind) {
  if (!t) return;
  t->marked = pynccl_ticks();
  __atomic_store_n(&t->mark, kind, __ATOMIC_RELEASE);
}

// --- plans
// --------------------------------------------------------------------------------------------------

static void pynccl_digest_sweep(pynccl_trace* t) {
  // In this order: a dump that begins later goes back no further than to this oldest one.
  const uint64_t oldest = pynccl_trace_oldest(t, __atomic_load_n(&t->next, __ATOMIC_SEQ_CST));
  if (!pynccl_no_dump()) return;
  for (pynccl_digest** link = &t->digests; *link;) {
    pynccl_digest* digest = *link;
    if (digest->dropped && digest->last <= oldest) {
      *link = digest->next;
      free(digest);
    } else {
      link = &digest->next;
    }
  }
}

static void pynccl_digest_drop(pynccl_trace* t, pynccl_digest* digest) {
  pynccl_trace_lock();
  digest->dropped = 1;
  pynccl_digest_sweep(t);
  pynccl_trace_unlock();
}

static pynccl_digest* pynccl_digest_new(pynccl_comm* comm, const pynccl_list* list) {
  int count = 0;
  for (int i = 0; i < list->count; ++i) count += list->calls[i].comm == comm;
  pynccl_digest* digest = calloc(1, sizeof *digest + count * sizeof *digest->calls);
  if (!digest) return NULL;
  for (int i = 0; i < list->count; ++i) {
    if (list->calls[i].comm != comm) continue;
    if (!digest->count) digest->stream = list->calls[i].stream;
    if (digest->stream != list->calls[i].stream) digest->stream = UINTPTR_MAX;
    digest->calls[digest->count++] = list->calls[i];
    digest->collectives += pynccl_is_collective(list->calls[i].kind);
  }
  pynccl_trace_lock();
  pynccl_digest_sweep(comm->trace);
  digest->next = comm->trace->digests;
  comm->trace->digests = digest;
  pynccl_trace_unlock();
  return digest;
}

static void pynccl_trace_plan(pynccl_trace* t, pynccl_digest* plan, uint64_t now, uint64_t group) {
  pynccl_entry* record = pynccl_trace_next(t);
  *record = (pynccl_entry){.called = now, .stream = plan->stream, .plan = plan, .kind = PYNCCL_PLAN};
  record->number = (uint32_t)(t->collectives + 1);
  record->group = (uint32_t)group;
  t->collectives += plan->collectives;
  if (plan->collectives < plan->count)
    for (int i = 0; i < plan->count; ++i)
      if (pynccl_is_pair(plan->calls[i].kind))
        ++*pynccl_pair(t, t->pairs, plan->calls[i].kind, plan->calls[i].root);
  plan->last = t->next + 1;
  pynccl_trace_publish(t);
}

static uint64_t pynccl_groups;

static int pynccl_is_traced(const pynccl_list* list) {
  for (int i = 0; i < list->use_count; ++i)
    if (list->uses[i].comm->trace) return 1;
  return 0;
}

// Record what a list is about to run: a plan's run as one record on each communicator, else every call.
static void pynccl_trace_list(pynccl_list* list) {
  const uint64_t now = pynccl_ticks();
  const uint64_t group = __atomic_add_fetch(&pynccl_groups, 1, __ATOMIC_RELAXED);
  for (int i = 0; i < list->use_count; ++i) {
    pynccl_use* use = &list->uses[i];
    if (!use->first || !use->comm->trace) continue;
    use->traced = use->comm->trace->next;
    if (use->digest) pynccl_trace_plan(use->comm->trace, use->digest, now, group);
  }
  for (int i = 0; i < list->count && !list->digested; ++i)
    if (list->calls[i].comm->trace)
      pynccl_trace_call(list->calls[i].comm->trace, &list->calls[i], now, group);
}

static void pynccl_trace_list_result(const pynccl_list* list, int result) {
  int waited = list->use_count > 0;
  for (int i = 0; i < list->use_count; ++i) waited &= list->uses[i].wait;
  for (int i = 0; i < list->use_count; ++i) {
    const pynccl_use* use = &list->uses[i];
    pynccl_trace* t = use->comm->trace;
    if (!use->first || !t) continue;
    const uint64_t oldest = pynccl_trace_oldest(t, t->next);
    for (uint64_t at = use->traced > oldest ? use->traced : oldest; at < t->next; ++at)
      pynccl_trace_result(pynccl_trace_at(t, at), result, waited);
  }
}

// --- callers
// ------------------------------------------------------------------------------------------------

#define PYNCCL_CALLERS 65536

static const char* pynccl_callers[PYNCCL_CALLERS];

unsigned pynccl_trace_intern(const char* text) {
  static unsigned used;
  unsigned number = 0;
  char* copy = strdup(text);
  pynccl_trace_lock();
  if (copy && used + 1 < PYNCCL_CALLERS) {
    number = ++used;
    __atomic_store_n(&pynccl_callers[number], copy, __ATOMIC_RELEASE);
  }
  pynccl_trace_unlock();
  if (!number) free(copy);
  return number;
}

void pynccl_trace_caller(pynccl_trace* t, unsigned caller) {
  if (t) t->caller = caller;
}
