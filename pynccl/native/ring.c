#include "ring.h"

#include <sched.h>
#include <stdlib.h>

#include "names.h"

// --- clocks ----------------------------------------------------------------------------------------------

pynccl_instant pynccl_first;

pynccl_instant pynccl_clock(void) {
  struct timespec now;
  const uint64_t before = pynccl_ticks();
  clock_gettime(CLOCK_REALTIME, &now);
  return (pynccl_instant){before + (pynccl_ticks() - before) / 2, now.tv_sec * 1000000000ll + now.tv_nsec};
}

// --- all rings of the process ------------------------------------------------------------------------------

pynccl_node* pynccl_nodes;
int pynccl_trace_busy;
int pynccl_dumping;
static int pynccl_kept;
static uint64_t pynccl_closed;

static void pynccl_trace_lock(void) {
  while (__atomic_exchange_n(&pynccl_trace_busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
}

static void pynccl_trace_unlock(void) { __atomic_store_n(&pynccl_trace_busy, 0, __ATOMIC_RELEASE); }

int pynccl_no_dump(void) { return !__atomic_load_n(&pynccl_dumping, __ATOMIC_SEQ_CST); }

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
      // The dump may be reading this ring: free it later.
      __atomic_store_n(&oldest->trace, trace, __ATOMIC_SEQ_CST);
      return;
    }
    pynccl_trace_free(trace);
  }
}

void pynccl_trace_start_clock(void) {
  pynccl_trace_lock();
  if (!pynccl_first.ticks) pynccl_first = pynccl_clock();
  pynccl_trace_unlock();
}

int64_t pynccl_trace_span(uint64_t ticks) {
  const pynccl_instant now = pynccl_clock();
  const uint64_t span = now.ticks - pynccl_first.ticks;
  return span ? (int64_t)((unsigned __int128)ticks * (now.ns - pynccl_first.ns) / span) : 0;
}

static int pynccl_trace_enlist(pynccl_trace* trace) {
  pynccl_trace_lock();
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

void pynccl_trace_algorithms(pynccl_trace* t, uintptr_t comm) {
  for (int kind = 0; t && kind < PYNCCL_SEND; ++kind) {
    const char *function = pynccl_kind_function(kind), *first = NULL;
    pynccl_algorithms* known = &t->algorithms[kind];
    const int most = sizeof known->by_size / sizeof *known->by_size;
    size_t size = 0;
    for (int i = 0; i < most && (!i || size); ++i) {
      const char** name = i ? &known->by_size[i].name : &first;
      if (pyncclCpuGetAlgorithm(comm, function, size, name, &known->by_size[i].most)) return;
      size = known->by_size[i].most + 1;
    }
    __atomic_store_n(&known->by_size[0].name, first, __ATOMIC_RELEASE);
  }
}

void pynccl_trace_close(pynccl_trace* t) {
  int listed = 0;
  pynccl_trace_lock();
  t->closed = ++pynccl_closed;
  for (pynccl_node* node = pynccl_nodes; node; node = node->next) listed |= node->trace == t;
  pynccl_trace_sweep();
  pynccl_trace_unlock();
  // A forked child does not list the rings of its parent.
  if (!listed) pynccl_trace_free(t);
}

void pynccl_trace_keep(int count) { pynccl_kept = count; }

// --- writing -----------------------------------------------------------------------------------------------

void pynccl_trace_complete(pynccl_trace* t, uintptr_t stream, uint64_t end, int result) {
  const uint64_t now = pynccl_ticks(), oldest = pynccl_trace_oldest(t, t->next);
  for (uint64_t i = end; i-- > oldest;) {
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
  if (t && token) pynccl_trace_result(pynccl_trace_at(t, token - 1), result, pynccl_ticks());
}

void pynccl_trace_mark(pynccl_trace* t, int kind) {
  if (!t) return;
  t->marked = pynccl_ticks();
  if (kind == PYNCCL_REVOKE) __atomic_store_n(&t->revoked, t->marked, __ATOMIC_RELEASE);
  __atomic_store_n(&t->mark, kind, __ATOMIC_RELEASE);
}

// --- plans -------------------------------------------------------------------------------------------------

static void pynccl_digest_sweep(pynccl_trace* t) {
  // In this order: a dump that starts later reads no record older than this one.
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

void pynccl_digest_drop(pynccl_trace* t, pynccl_digest* digest) {
  pynccl_trace_lock();
  digest->dropped = 1;
  pynccl_digest_sweep(t);
  pynccl_trace_unlock();
}

void pynccl_digest_add(pynccl_trace* t, pynccl_digest* digest) {
  pynccl_trace_lock();
  pynccl_digest_sweep(t);
  digest->next = t->digests;
  t->digests = digest;
  pynccl_trace_unlock();
}

void pynccl_trace_plan(pynccl_trace* t, pynccl_digest* plan, uint64_t now, uint64_t group) {
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

// --- callers -----------------------------------------------------------------------------------------------

const char* pynccl_callers[PYNCCL_CALLERS];

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
