// Included by the generated binding, behind calls.h and before calls.c, which writes the records.

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum pynccl_state {
  PYNCCL_CALLED = 1,  // in the C call
  PYNCCL_TAKEN,       // the library has it
  PYNCCL_DONE,        // known to be complete
  PYNCCL_FAILED
};

typedef struct pynccl_entry {
  uint64_t called;  // in ticks
  uint64_t ended;   // 0: not known
  uint64_t number;  // of a collective on its communicator, of a send or recv with its peer; a run's first
                    // collective
  uint64_t group;   // 0: none
  uintptr_t send;
  uintptr_t recv;
  uintptr_t stream;
  size_t count;
  const pynccl_digest* plan;  // what a run stands for
  int root;
  int op;
  int result;
  unsigned caller;
  short kind;
  unsigned char datatype;
  unsigned char state;
} pynccl_entry;

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
  size_t slot;    // next % slots
  size_t slots;   // one more than are shown: the one that may be being written
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

static pynccl_instant pynccl_now(void) {
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
  if (!pynccl_first.ticks) pynccl_first = pynccl_now();
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
  t->slots = records + 1;
  t->size = size;
  t->records = calloc(t->slots, sizeof *t->records);
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
  return &t->records[t->slot];
}

static inline void pynccl_trace_publish(pynccl_trace* t) {
  t->slot = t->slot + 1 == t->slots ? 0 : t->slot + 1;
  // The ring is larger than the nearest cache, and calls are far apart.
  __builtin_prefetch((char*)&t->records[t->slot], 1);
  __builtin_prefetch((char*)&t->records[t->slot] + 64, 1);
  __atomic_store_n(&t->next, t->next + 1, __ATOMIC_RELEASE);
}

static inline pynccl_entry* pynccl_trace_call(pynccl_trace* t, const pynccl_call* c, uint64_t now,
                                              uint64_t group) {
  pynccl_entry* record = pynccl_trace_next(t);
  uint64_t* counter = pynccl_is_pair(c->kind) ? pynccl_pair(t, t->pairs, c->kind, c->root) : &t->collectives;
  record->called = now;
  record->ended = 0;
  record->number = ++*counter;
  record->group = group;
  record->send = c->send;
  record->recv = c->recv;
  record->stream = c->stream;
  record->count = c->count;
  record->plan = NULL;
  record->root = c->root;
  record->op = c->op;
  record->result = 0;
  record->caller = c->caller;
  record->kind = c->kind;
  record->datatype = c->datatype;
  record->state = PYNCCL_CALLED;
  pynccl_trace_publish(t);
  return record;
}

static inline void pynccl_trace_result(pynccl_entry* record, int result, int waited) {
  record->result = result == PYNCCL_WAITING ? 0 : result;
  if (result && result != PYNCCL_WAITING && result != ncclInProgress) {
    record->state = PYNCCL_FAILED;
  } else if (result || !waited) {
    record->state = PYNCCL_TAKEN;
  } else {
    record->ended = pynccl_ticks();
    record->state = PYNCCL_DONE;
  }
}

static pynccl_entry* pynccl_trace_at(const pynccl_trace* t, uint64_t position) {
  return &t->records[position % t->slots];
}

static uint64_t pynccl_trace_oldest(const pynccl_trace* t, uint64_t next) {
  return next < t->slots ? 0 : next - t->slots + 1;
}

// The stream has got behind everything that was called on it.
static void pynccl_trace_complete(pynccl_trace* t, uintptr_t stream) {
  const uint64_t now = pynccl_ticks(), oldest = pynccl_trace_oldest(t, t->next);
  for (uint64_t i = t->next; i-- > oldest;) {
    pynccl_entry* record = pynccl_trace_at(t, i);
    if (record->stream != stream || record->kind > PYNCCL_PLAN || record->state == PYNCCL_FAILED) continue;
    if (record->state == PYNCCL_DONE) break;
    record->ended = now;
    record->result = 0;
    record->state = PYNCCL_DONE;
  }
}

uint64_t pynccl_trace_begin(pynccl_trace* t, int kind, int detail) {
  if (!t) return 0;
  pynccl_entry* record = pynccl_trace_next(t);
  *record = (pynccl_entry){.called = pynccl_ticks(), .root = detail, .kind = kind, .state = PYNCCL_CALLED};
  record->caller = t->caller;
  if (pynccl_is_collective(kind)) record->number = ++t->collectives;
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
  if (!pynccl_no_dump()) return;
  const uint64_t oldest = pynccl_trace_oldest(t, __atomic_load_n(&t->next, __ATOMIC_SEQ_CST));
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
  *record = (pynccl_entry){.called = now, .number = t->collectives + 1, .group = group, .plan = plan};
  record->stream = plan->stream;
  record->kind = PYNCCL_PLAN;
  record->state = PYNCCL_CALLED;
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
  const int alone = list->count == 1 && !list->grouped;
  const uint64_t group = alone ? 0 : __atomic_add_fetch(&pynccl_groups, 1, __ATOMIC_RELAXED);
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

// --- dumping: nothing below allocates or waits
// ---------------------------------------------------------------

#define PYNCCL_REASONS 16

typedef struct pynccl_reason {
  char kind[16];
  char text[480];
  int64_t ns;
  int ready;
} pynccl_reason;

static pynccl_reason pynccl_reasons[PYNCCL_REASONS];
static int pynccl_reason_count;
static char pynccl_process[4096], pynccl_file[4096], pynccl_draft[4128];
static int pynccl_pending;

static struct {
  int fd;
  int error;
  size_t used;
  pynccl_instant now;
  char text[16384];
} out;

static void pynccl_flush(void) {
  for (size_t done = 0; done < out.used && !out.error;) {
    const ssize_t n = write(out.fd, out.text + done, out.used - done);
    if (n > 0) done += n;
    if (n < 0 && errno != EINTR) out.error = errno;
  }
  out.used = 0;
}

static void pynccl_put(const char* text) {
  for (; *text; ++text) {
    if (out.used == sizeof out.text) pynccl_flush();
    out.text[out.used++] = *text;
  }
}

static void pynccl_put_number(int64_t value) {
  char digits[24], *at = digits + sizeof digits;
  uint64_t rest = value < 0 ? -(uint64_t)value : (uint64_t)value;
  *--at = 0;
  do *--at = '0' + rest % 10;
  while (rest /= 10);
  if (value < 0) *--at = '-';
  pynccl_put(at);
}

static void pynccl_put_text(const char* text) {
  pynccl_put("\"");
  for (; *text; ++text) {
    const char one[] = {*text, 0}, escaped[] = {'\\', *text, 0};
    pynccl_put(*text == '"' || *text == '\\' ? escaped : (unsigned char)*text < ' ' ? " " : one);
  }
  pynccl_put("\"");
}

static void pynccl_field(const char* name, int64_t value) {
  pynccl_put(", \"");
  pynccl_put(name);
  pynccl_put("\": ");
  pynccl_put_number(value);
}

static void pynccl_text_field(const char* name, const char* value) {
  pynccl_put(", \"");
  pynccl_put(name);
  pynccl_put("\": ");
  pynccl_put_text(value);
}

static const char* const pynccl_kind_names[] = {
    [PYNCCL_ALL_REDUCE] = "all_reduce",
    [PYNCCL_REDUCE] = "reduce",
    [PYNCCL_BROADCAST] = "broadcast",
    [PYNCCL_ALL_GATHER] = "all_gather",
    [PYNCCL_REDUCE_SCATTER] = "reduce_scatter",
    [PYNCCL_ALL_TO_ALL] = "all_to_all",
    [PYNCCL_GATHER] = "gather",
    [PYNCCL_SCATTER] = "scatter",
    [PYNCCL_SEND] = "send",
    [PYNCCL_RECV] = "recv",
    [PYNCCL_BARRIER] = "barrier",
    [PYNCCL_PLAN] = "plan",
    [PYNCCL_INIT] = "init",
    [PYNCCL_SPLIT] = "split",
    [PYNCCL_SHRINK] = "shrink",
    [PYNCCL_GROW] = "grow",
    [PYNCCL_FINALIZE] = "finalize",
    [PYNCCL_DESTROY] = "destroy",
    [PYNCCL_SUSPEND] = "suspend",
    [PYNCCL_RESUME] = "resume",
    [PYNCCL_ABORT] = "abort",
    [PYNCCL_REVOKE] = "revoke",
};
static const char* const pynccl_type_names[ncclNumTypes] = {
    "int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
    "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
static const char* const pynccl_op_names[ncclNumOps] = {"sum", "prod", "max", "min", "avg"};
static const char* const pynccl_state_names[] = {"", "called", "taken", "done", "failed"};

static void pynccl_put_record(const pynccl_entry* r) {
  const int pair = pynccl_is_pair(r->kind), array = r->kind < PYNCCL_BARRIER;
  pynccl_put("{\"call\": ");
  pynccl_put_text(pynccl_kind_names[r->kind]);
  if (pair) {
    pynccl_field("peer_seq", r->number);
    pynccl_field("peer", r->root);
  } else if (pynccl_is_collective(r->kind) || r->kind == PYNCCL_INIT) {
    pynccl_field("seq", r->number);
  }
  if (array) {
    pynccl_field("count", r->count);
    pynccl_text_field("dtype", r->datatype < ncclNumTypes ? pynccl_type_names[r->datatype] : "?");
    if (r->kind == PYNCCL_ALL_REDUCE || r->kind == PYNCCL_REDUCE || r->kind == PYNCCL_REDUCE_SCATTER)
      pynccl_text_field("op", (unsigned)r->op < ncclNumOps ? pynccl_op_names[r->op] : "pre_mul_sum");
    if (r->kind == PYNCCL_REDUCE || r->kind == PYNCCL_BROADCAST || r->kind == PYNCCL_GATHER ||
        r->kind == PYNCCL_SCATTER)
      pynccl_field("root", r->root);
    pynccl_field("send", r->send);
    pynccl_field("recv", r->recv);
    pynccl_field("stream", r->stream);
  }
  if (r->kind == PYNCCL_SPLIT) pynccl_field("color", r->root);
  if (r->group) pynccl_field("group", r->group);
  if (r->plan) pynccl_put(", \"plan\": true");
  pynccl_field("time_ns", pynccl_ns(r->called, out.now));
  if (r->ended) pynccl_field("end_ns", pynccl_ns(r->ended, out.now));
  pynccl_text_field("state", pynccl_state_names[r->state]);
  pynccl_field("result", r->result);
  const char* at =
      r->caller < PYNCCL_CALLERS ? __atomic_load_n(&pynccl_callers[r->caller], __ATOMIC_ACQUIRE) : NULL;
  if (at) pynccl_text_field("at", at);
  pynccl_put("}\n");
}

// Copy a record; 0 when it was overwritten meanwhile.
static int pynccl_copy(const pynccl_trace* t, uint64_t position, pynccl_entry* copy) {
  *copy = *pynccl_trace_at(t, position);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return position >= pynccl_trace_oldest(t, __atomic_load_n(&t->next, __ATOMIC_ACQUIRE));
}

// Where to begin, so that about as many calls are shown as there are slots, however many a plan has. Leaves
// in `scratch` the calls made with each peer before.
static uint64_t pynccl_dump_start(const pynccl_trace* t, uint64_t next) {
  const uint64_t oldest = pynccl_trace_oldest(t, next);
  size_t shown = 0;
  uint64_t at = next;
  memcpy(t->scratch, t->pairs, 2 * (size_t)t->size * sizeof *t->pairs);
  while (at > oldest && shown + 1 < t->slots) {
    pynccl_entry r;
    if (!pynccl_copy(t, --at, &r)) return at + 1;
    shown += r.plan ? r.plan->count : 1;
    if (pynccl_is_pair(r.kind)) *pynccl_pair(t, t->scratch, r.kind, r.root) = r.number - 1;
    for (int i = 0; r.plan && i < r.plan->count; ++i)
      if (pynccl_is_pair(r.plan->calls[i].kind))
        --*pynccl_pair(t, t->scratch, r.plan->calls[i].kind, r.plan->calls[i].root);
  }
  return at;
}

static void pynccl_unfold(const pynccl_trace* t, const pynccl_entry* run) {
  pynccl_entry r = *run;
  uint64_t collective = run->number;
  for (int i = 0; i < run->plan->count; ++i) {
    const pynccl_call* c = &run->plan->calls[i];
    const int pair = pynccl_is_pair(c->kind);
    r.number = pair ? ++*pynccl_pair(t, t->scratch, c->kind, c->root) : collective++;
    r.kind = c->kind, r.datatype = c->datatype, r.op = c->op, r.root = c->root, r.caller = c->caller;
    r.send = c->send, r.recv = c->recv, r.count = c->count, r.stream = c->stream;
    pynccl_put_record(&r);
  }
}

static void pynccl_dump_trace(const pynccl_trace* t) {
  const uint64_t next = __atomic_load_n(&t->next, __ATOMIC_ACQUIRE), start = pynccl_dump_start(t, next);
  const int mark = __atomic_load_n(&t->mark, __ATOMIC_ACQUIRE);
  pynccl_put("{");
  pynccl_put(t->header);
  pynccl_field("collectives", t->collectives);
  pynccl_field("overwritten", start);
  if (t->closed) pynccl_put(", \"closed\": true");
  if (mark) {
    pynccl_text_field("ended", pynccl_kind_names[mark]);
    pynccl_field("ended_ns", pynccl_ns(t->marked, out.now));
  }
  pynccl_put("}\n");
  for (uint64_t at = start; at < next; ++at) {
    pynccl_entry record;
    if (!pynccl_copy(t, at, &record)) continue;
    if (record.plan) {
      pynccl_unfold(t, &record);
    } else {
      if (pynccl_is_pair(record.kind)) *pynccl_pair(t, t->scratch, record.kind, record.root) = record.number;
      pynccl_put_record(&record);
    }
  }
}

static void pynccl_put_process(void) {
  pynccl_put("{");
  pynccl_put(pynccl_process);
  pynccl_put(", \"clock\": [[");
  pynccl_put_number(pynccl_first.ticks);
  pynccl_put(", ");
  pynccl_put_number(pynccl_first.ns);
  pynccl_put("], [");
  pynccl_put_number(out.now.ticks);
  pynccl_put(", ");
  pynccl_put_number(out.now.ns);
  pynccl_put("]], \"reasons\": [");
  const int count = __atomic_load_n(&pynccl_reason_count, __ATOMIC_ACQUIRE);
  for (int i = 0, shown = 0; i < count && i < PYNCCL_REASONS; ++i) {
    if (!__atomic_load_n(&pynccl_reasons[i].ready, __ATOMIC_ACQUIRE)) continue;
    pynccl_put(shown++ ? ", {\"kind\": " : "{\"kind\": ");
    pynccl_put_text(pynccl_reasons[i].kind);
    pynccl_text_field("text", pynccl_reasons[i].text);
    pynccl_field("time_ns", pynccl_reasons[i].ns);
    pynccl_put("}");
  }
  pynccl_put("]}\n");
}

// Everything below has pynccl_dumping.
static int pynccl_dump_to(int fd, const pynccl_trace* only) {
  out.fd = fd;
  out.error = 0;
  out.used = 0;
  out.now = pynccl_now();
  pynccl_put_process();
  for (pynccl_node* node = __atomic_load_n(&pynccl_nodes, __ATOMIC_SEQ_CST); node; node = node->next) {
    const pynccl_trace* trace = __atomic_load_n(&node->trace, __ATOMIC_SEQ_CST);
    if (trace && (!only || trace == only)) pynccl_dump_trace(trace);
  }
  pynccl_flush();
  return out.error;
}

// A draft first: who is killed meanwhile leaves the dump before.
static int pynccl_dump_to_file(void) {
  if (!*pynccl_file) return ENOENT;
  size_t length = strlen(pynccl_file);
  memcpy(pynccl_draft, pynccl_file, length);
  memcpy(pynccl_draft + length, ".new", 5);
  const int fd = open(pynccl_draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return errno;
  int error = pynccl_dump_to(fd, NULL);
  if (close(fd) && !error) error = errno;
  if (!error && rename(pynccl_draft, pynccl_file)) error = errno;
  if (error) unlink(pynccl_draft);
  return error;
}

static int pynccl_dump_enter(void) { return !__atomic_exchange_n(&pynccl_dumping, 1, __ATOMIC_SEQ_CST); }

static void pynccl_dump_leave(void) {
  __atomic_store_n(&pynccl_dumping, 0, __ATOMIC_SEQ_CST);
  // Somebody wanted the file meanwhile: another thread, or a handler that interrupted this one.
  while (__atomic_exchange_n(&pynccl_pending, 0, __ATOMIC_SEQ_CST)) {
    if (!pynccl_dump_enter()) {
      __atomic_store_n(&pynccl_pending, 1, __ATOMIC_SEQ_CST);
      if (!pynccl_no_dump()) return;
      continue;
    }
    pynccl_dump_to_file();
    __atomic_store_n(&pynccl_dumping, 0, __ATOMIC_SEQ_CST);
  }
}

int pynccl_trace_dump(int fd, const pynccl_trace* only) {
  if (!pynccl_dump_enter()) return EBUSY;
  const int error = pynccl_dump_to(fd, only);
  pynccl_dump_leave();
  return error;
}

void pynccl_trace_dump_all(int fd) { pynccl_trace_dump(fd, NULL); }

static void pynccl_copy_text(char* to, size_t room, const char* text) {
  size_t length = strlen(text);
  if (length >= room) length = room - 1;
  // Not in the middle of a character.
  while (length && text[length] && ((unsigned char)text[length] & 0xc0) == 0x80) --length;
  memcpy(to, text, length);
  to[length] = 0;
}

int pynccl_trace_save(const char* kind, const char* text) {
  const int index = __atomic_fetch_add(&pynccl_reason_count, 1, __ATOMIC_ACQ_REL);
  if (index < PYNCCL_REASONS) {
    pynccl_reason* reason = &pynccl_reasons[index];
    pynccl_copy_text(reason->kind, sizeof reason->kind, kind);
    pynccl_copy_text(reason->text, sizeof reason->text, text);
    reason->ns = pynccl_now().ns;
    __atomic_store_n(&reason->ready, 1, __ATOMIC_RELEASE);
  }
  if (!pynccl_dump_enter()) {
    __atomic_store_n(&pynccl_pending, 1, __ATOMIC_SEQ_CST);
    // It may have ended just now, without seeing this.
    if (!pynccl_no_dump() || !pynccl_dump_enter()) return EBUSY;
  }
  const int error = pynccl_dump_to_file();
  pynccl_dump_leave();
  return error;
}

int pynccl_trace_process(const char* header, const char* path) {
  if (strlen(header) >= sizeof pynccl_process || strlen(path) >= sizeof pynccl_file) return ENAMETOOLONG;
  strcpy(pynccl_process, header);
  strcpy(pynccl_file, path);
  return 0;
}

static struct sigaction pynccl_before;
static char pynccl_signal_name[32];

static void pynccl_on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  pynccl_trace_save("signal", pynccl_signal_name);
  if (pynccl_before.sa_flags & SA_SIGINFO)
    pynccl_before.sa_sigaction(number, info, context);
  else if (pynccl_before.sa_handler != SIG_DFL && pynccl_before.sa_handler != SIG_IGN)
    pynccl_before.sa_handler(number);
  errno = saved;
}

int pynccl_trace_on_signal(int number, const char* name) {
  struct sigaction now,
      mine = {.sa_sigaction = pynccl_on_signal, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
  if (sigaction(number, NULL, &now)) return errno;
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == pynccl_on_signal) return 0;
  pynccl_copy_text(pynccl_signal_name, sizeof pynccl_signal_name, name);
  sigemptyset(&mine.sa_mask);
  pynccl_before = now;
  return sigaction(number, &mine, NULL) ? errno : 0;
}

// In a forked child: what the rings hold is the parent's.
void pynccl_trace_forked(void) {
  pynccl_trace_busy = pynccl_dumping = pynccl_pending = 0;
  for (pynccl_node* node = pynccl_nodes; node; node = node->next) node->trace = NULL;
  memset(pynccl_reasons, 0, sizeof pynccl_reasons);
  pynccl_reason_count = 0;
  *pynccl_file = 0;
}
