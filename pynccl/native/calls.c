#include "calls.h"

#include <pthread.h>
#include <stdlib.h>

#include "internal.h"
#include "recording.h"
#include "ring.h"
#include "watchdog.h"

__thread pynccl_list* pynccl_recording;

int pynccl_is_recording(void) { return pynccl_recording != NULL; }

int pynccl_group_depth(void) { return pynccl_depth + pynccl_is_recording(); }

// --- entering a communicator
// --------------------------------------------------------------------------------------

static uintptr_t pynccl_me(void) { return (uintptr_t)pthread_self(); }

int pynccl_enter(pynccl_comm* comm) {
  if (pynccl_enter_anyway(comm)) return PYNCCL_BUSY;
  if (__atomic_load_n(&comm->handle, __ATOMIC_ACQUIRE)) return 0;
  pynccl_leave(comm);
  return PYNCCL_CLOSED;
}

int pynccl_enter_anyway(pynccl_comm* comm) {
  uintptr_t nobody = 0;
  const int mine =
      __atomic_compare_exchange_n(&comm->busy, &nobody, pynccl_me(), 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
  if (!mine) return PYNCCL_BUSY;
  const uintptr_t only = __atomic_load_n(&comm->reserved, __ATOMIC_RELAXED);
  if (!only || only == pynccl_me()) return 0;
  pynccl_leave(comm);
  return PYNCCL_BUSY;
}

int pynccl_reserve(pynccl_comm* comm) {
  if (pynccl_enter_anyway(comm)) return PYNCCL_BUSY;
  __atomic_store_n(&comm->reserved, pynccl_me(), __ATOMIC_RELAXED);
  pynccl_leave(comm);
  return 0;
}

void pynccl_leave(pynccl_comm* comm) { __atomic_store_n(&comm->busy, 0, __ATOMIC_RELEASE); }

int pynccl_leave_mine(pynccl_comm* comm) {
  if (__atomic_load_n(&comm->busy, __ATOMIC_RELAXED) != pynccl_me()) return 0;
  pynccl_leave(comm);
  return 1;
}

void pynccl_comm_reached(pynccl_comm* comm, uintptr_t stream, uint64_t position) {
  // Only the thread in the communicator writes its records. If another thread is in it, the next event that
  // is reached completes them.
  if (!comm->trace || pynccl_enter_anyway(comm)) return;
  pynccl_trace_complete(comm->trace, stream, position, 0);
  pynccl_leave(comm);
}

// A stream that the library refused may not exist.
static void pynccl_use_stream(pynccl_comm* comm, uintptr_t stream, int result) {
  if (!result || result == ncclInProgress) pynccl_comm_use(comm, stream);
}

// --- one call ----------------------------------------------------------------------------------------------

static int pynccl_disjoint(uintptr_t a, size_t a_bytes, uintptr_t b, size_t b_bytes) {
  return a + a_bytes <= b || b + b_bytes <= a;
}

// nccl.h defines what in place means for each function; any other overlap is forbidden.
static int pynccl_overlaps(const pynccl_call* c) {
  const pynccl_comm* comm = c->comm;
  size_t bytes = c->count * pynccl_item_sizes[c->datatype], all = bytes * comm->size,
         mine = bytes * comm->rank;
  switch (c->kind) {
    case PYNCCL_SEND:
    case PYNCCL_RECV:
    case PYNCCL_PUT_SIGNAL:
    case PYNCCL_SIGNAL:
    case PYNCCL_WAIT_SIGNAL:
      return 0;
    case PYNCCL_ALL_TO_ALL:
      return !pynccl_disjoint(c->send, all, c->recv, all);
    case PYNCCL_GATHER:
      if (comm->rank != c->root) return 0;
      // fall through
    case PYNCCL_ALL_GATHER:
    case PYNCCL_WINDOW:
    case PYNCCL_CLOSE_WINDOW:
      return c->send != c->recv + mine && !pynccl_disjoint(c->send, bytes, c->recv, all);
    case PYNCCL_SCATTER:
      if (comm->rank != c->root) return 0;
      // fall through
    case PYNCCL_REDUCE_SCATTER:
      return c->recv != c->send + mine && !pynccl_disjoint(c->send, all, c->recv, bytes);
    case PYNCCL_REDUCE:
      if (comm->rank != c->root) return 0;
      // fall through
    default:
      return c->send != c->recv && !pynccl_disjoint(c->send, bytes, c->recv, bytes);
  }
}

// AlltoAll, Gather and Scatter for a library without them: grouped sends and receives.
static int pynccl_pairs(const pynccl_call* c) {
  const int me = c->comm->rank, to_one = c->kind == PYNCCL_GATHER, from_one = c->kind == PYNCCL_SCATTER;
  const size_t bytes = c->count * pynccl_item_sizes[c->datatype];
  int r = ncclGroupStart();
  if (r) return r;
  for (int peer = 0; peer < c->comm->size && !r; ++peer) {
    if (to_one ? peer == c->root : from_one ? me == c->root : 1)
      r = ncclSend(c->send + (to_one ? 0 : peer * bytes), c->count, c->datatype, peer, c->comm->handle,
                   c->stream);
    if (!r && (to_one ? me == c->root : from_one ? peer == c->root : 1))
      r = ncclRecv(c->recv + (from_one ? 0 : peer * bytes), c->count, c->datatype, peer, c->comm->handle,
                   c->stream);
  }
  const int end = ncclGroupEnd();
  return r ? r : end;
}

static int pynccl_or_pairs(int result, const pynccl_call* c) {
  return result == PYNCCL_NOT_FOUND && !c->config ? pynccl_pairs(c) : result;
}

static int pynccl_put(const pynccl_call* c, int signal, int context) {
  const uintptr_t window = __atomic_load_n(c->window, __ATOMIC_ACQUIRE);
  if (!window) return PYNCCL_NO_WINDOW;
  return ncclPutSignal(c->send, c->count, c->datatype, c->root, window, c->recv, signal, context, 0,
                       c->comm->handle, c->stream);
}

static int pynccl_one_sided(const pynccl_call* c) {
  const int signal = c->op & ((1 << PYNCCL_SIGNAL_BITS) - 1), context = c->op >> PYNCCL_SIGNAL_BITS;
  if (c->kind == PYNCCL_PUT_SIGNAL) return pynccl_put(c, signal, context);
  if (c->kind == PYNCCL_SIGNAL) return ncclSignal(c->root, signal, context, 0, c->comm->handle, c->stream);
  ncclWaitSignalDesc_t wait = {.opCnt = (int)c->count, .peer = c->root, .sigIdx = signal, .ctx = context};
  return ncclWaitSignal(1, &wait, c->comm->handle, c->stream);
}

#define PLAIN(function, ...) function(__VA_ARGS__, c->comm->handle, c->stream)
#define CALL(function, ...)                                                         \
  (c->config ? function##Config(__VA_ARGS__, c->comm->handle, c->stream, c->config) \
             : PLAIN(function, __VA_ARGS__))

// In place on one rank there is nothing to do, except for PreMulSum. The library checks a stream of the
// caller's, and refuses the call of a communicator that has failed or was revoked.
__attribute__((noinline)) static int pynccl_is_done(const pynccl_call* c) {
  const int own_stream = c->stream <= 2 || c->stream == c->comm->stream;
  if (!own_stream || c->send != c->recv || c->kind >= PYNCCL_SEND || c->op >= ncclNumOps) return 0;
  if (__atomic_load_n(&c->comm->revoked, __ATOMIC_RELAXED)) return 0;
  int state = ncclSuccess;
  const int r = ncclCommGetAsyncError(c->comm->handle, &state);
  return (!r || r == PYNCCL_NOT_FOUND) && (!state || state == ncclInProgress);
}

static int pynccl_run(const pynccl_call* c) {
  if (c->comm->size == 1 && pynccl_is_done(c)) return 0;
  switch (c->kind) {
    case PYNCCL_BARRIER:
    case PYNCCL_ALL_REDUCE:
      return CALL(ncclAllReduce, c->send, c->recv, c->count, c->datatype, c->op);
    case PYNCCL_REDUCE:
      return CALL(ncclReduce, c->send, c->recv, c->count, c->datatype, c->op, c->root);
    case PYNCCL_BROADCAST:
      return CALL(ncclBroadcast, c->send, c->recv, c->count, c->datatype, c->root);
    case PYNCCL_WINDOW:
    case PYNCCL_CLOSE_WINDOW:
      // With NVIDIA's library nothing tells an exchange from an all_gather of the program.
      if (c->comm->waits)
        return PLAIN(pyncclCpuExchange, c->send, c->recv, c->count,
                     c->kind == PYNCCL_WINDOW ? pyncclCpuBeforeRegister : pyncclCpuBeforeDeregister);
      // fall through
    case PYNCCL_ALL_GATHER:
      return CALL(ncclAllGather, c->send, c->recv, c->count, c->datatype);
    case PYNCCL_REDUCE_SCATTER:
      return CALL(ncclReduceScatter, c->send, c->recv, c->count, c->datatype, c->op);
    case PYNCCL_ALL_TO_ALL:
      return pynccl_or_pairs(CALL(ncclAlltoAll, c->send, c->recv, c->count, c->datatype), c);
    case PYNCCL_GATHER:
      return pynccl_or_pairs(CALL(ncclGather, c->send, c->recv, c->count, c->datatype, c->root), c);
    case PYNCCL_SCATTER:
      return pynccl_or_pairs(CALL(ncclScatter, c->send, c->recv, c->count, c->datatype, c->root), c);
    case PYNCCL_SEND:
      return PLAIN(ncclSend, c->send, c->count, c->datatype, c->root);
    case PYNCCL_RECV:
      return PLAIN(ncclRecv, c->recv, c->count, c->datatype, c->root);
    case PYNCCL_PUT_SIGNAL:
    case PYNCCL_SIGNAL:
    case PYNCCL_WAIT_SIGNAL:
      return pynccl_one_sided(c);
    default:
      return ncclInvalidArgument;
  }
}

static inline void pynccl_raise(uint64_t* number, uint64_t by) {
  // Another thread may read it.
  __atomic_store_n(number, *number + by, __ATOMIC_RELAXED);
}

static inline int pynccl_is_failure(int result) {
  return result && result != ncclInProgress && result != PYNCCL_WAITING;
}

static inline uint64_t pynccl_bytes(const pynccl_call* c) {
  const int has_bytes = c->kind < PYNCCL_BARRIER || c->kind == PYNCCL_PUT_SIGNAL;
  return has_bytes ? c->count * pynccl_item_sizes[c->datatype] : 0;
}

static inline void pynccl_tally_calls(pynccl_comm* comm, int kind, uint64_t calls, uint64_t bytes) {
  pynccl_raise(&comm->tallies[kind].calls, calls);
  pynccl_raise(&comm->tallies[kind].bytes, bytes);
}

static inline void pynccl_tally_result(const pynccl_call* c, int result) {
  if (pynccl_is_failure(result)) pynccl_raise(&c->comm->tallies[c->kind].failed, 1);
}

static int pynccl_wait(uintptr_t comm, uintptr_t stream) {
  // Inside ncclGroupStart the call is not issued yet.
  if (pynccl_depth) return 0;
  const int r = pyncclCpuStreamSynchronize(comm, stream, PYNCCL_SLICE_MS);
  return r == ncclInProgress ? PYNCCL_WAITING : r;
}

static int pynccl_append(pynccl_list* list, const pynccl_call* call, int wait);

// Whether ranks have failed or have not come. In the trace, a call that waits for them stays outstanding.
static int pynccl_misses_ranks(pynccl_comm* comm) {
  const int trouble = pynccl_watch_verdict(comm, NULL, 0);
  return trouble == PYNCCL_RANKS_FAILED || trouble == PYNCCL_TIMED_OUT;
}

static int pynccl_may_go_on(int result) { return result == PYNCCL_STOPPED || result == PYNCCL_TOO_LATE; }

// Record a call; an interrupted one that goes on has the newest record.
static inline pynccl_entry* pynccl_record(pynccl_trace* trace, const pynccl_call* call, uint64_t now) {
  if (pynccl_watch_resumes(call->comm)) return pynccl_trace_at(trace, trace->next - 1);
  return pynccl_trace_call(trace, call, now, 0);
}

// Issue one call outside a group; enters the communicator.
static inline int pynccl_issue_alone(const pynccl_call* call, int wait) {
  pynccl_comm* comm = call->comm;
  pynccl_trace* trace = comm->trace;
  const uint64_t now = trace || wait ? pynccl_ticks() : 0;
  int r = pynccl_enter(comm);
  if (r) return r;
  // Before the announcement: check mode may wait there.
  pynccl_entry* record = trace ? pynccl_record(trace, call, now) : NULL;
  if (comm->watch) {
    r = pynccl_watch_announce(comm, call, 1);
    if (!r) r = pynccl_watch_compare(comm);
    if (r) {
      if (record && !pynccl_may_go_on(r) && !pynccl_misses_ranks(comm))
        pynccl_trace_result(record, ncclInvalidUsage, 0);
      pynccl_leave(comm);
      return r;
    }
    pynccl_watch_begin(comm, call, 1);
  }
  r = pynccl_run(call);
  pynccl_use_stream(comm, call->stream, r);
  if (comm->watch) {
    if (!wait && !r) pynccl_watch_issued(comm, call->stream);
    pynccl_watch_end(comm);
  }
  if (wait && !r) r = pynccl_wait(comm->handle, call->stream);
  pynccl_tally_calls(comm, call->kind, 1, pynccl_bytes(call));
  pynccl_tally_result(call, r);
  const uint64_t end = wait ? pynccl_ticks() : 0;
  if (wait) pynccl_raise(&comm->tallies[call->kind].waited, end - now);
  if (record) pynccl_trace_result(record, r, wait && !pynccl_depth ? end : 0);
  if (r != PYNCCL_WAITING) pynccl_leave(comm);
  return r;
}

int pynccl_issue(const pynccl_call* like, uintptr_t send, uintptr_t recv, size_t count, uintptr_t stream,
                 int wait) {
  pynccl_call call = *like;
  call.send = send;
  call.recv = recv;
  call.count = count;
  call.stream = stream;
  if (pynccl_overlaps(&call)) return PYNCCL_OVERLAP;
  call.caller = call.comm->trace ? call.comm->trace->caller : 0;
  if (!pynccl_recording) return pynccl_issue_alone(&call, wait);
  if (!call.comm->handle) return PYNCCL_CLOSED;
  const int r = pynccl_append(pynccl_recording, &call, wait);
  return r ? r : PYNCCL_RECORDED;
}

int pynccl_issue_usual(const pynccl_call* like, uintptr_t send, uintptr_t recv, size_t count) {
  return pynccl_issue(like, send, recv, count, like->comm->stream, like->comm->waits);
}

// --- lists of calls ----------------------------------------------------------------------------------------

pynccl_list* pynccl_list_new(void) { return calloc(1, sizeof(pynccl_list)); }

void pynccl_list_clear(pynccl_list* list) {
  for (int i = 0; i < list->use_count; ++i) {
    if (list->uses[i].digest) pynccl_digest_drop(list->uses[i].comm->trace, list->uses[i].digest);
    pynccl_comm_release(list->uses[i].comm);
  }
  list->count = list->use_count = list->sum_count = list->digested = 0;
}

void pynccl_list_free(pynccl_list* list) {
  if (list) {
    pynccl_list_clear(list);
    free(list->calls);
    free(list->uses);
    free(list->sums);
    free(list->kept);
  }
  free(list);
}

static int pynccl_add_use(pynccl_list* list, pynccl_comm* comm, uintptr_t stream, int wait) {
  int first = 1;
  for (int i = list->use_count; i-- > 0;) {
    pynccl_use* use = &list->uses[i];
    if (use->comm != comm) continue;
    if (use->stream == stream) {
      use->wait |= wait;
      return 0;
    }
    first = 0;
  }
  pynccl_use* uses = pynccl_room(list->uses, list->use_count, &list->use_capacity, sizeof *uses);
  if (!uses) return PYNCCL_NO_MEMORY;
  list->uses = uses;
  __atomic_add_fetch(&comm->references, 1, __ATOMIC_RELAXED);
  uses[list->use_count++] = (pynccl_use){.comm = comm, .stream = stream, .wait = wait, .first = first};
  return 0;
}

static int pynccl_add_to_sum(pynccl_list* list, const pynccl_call* call) {
  int i = list->sum_count;
  while (i-- > 0)
    if (list->sums[i].comm == call->comm && list->sums[i].kind == call->kind) break;
  if (i < 0) {
    pynccl_sum* sums = pynccl_room(list->sums, list->sum_count, &list->sum_capacity, sizeof *sums);
    if (!sums) return PYNCCL_NO_MEMORY;
    list->sums = sums;
    i = list->sum_count++;
    sums[i] = (pynccl_sum){.comm = call->comm, .kind = call->kind};
  }
  ++list->sums[i].calls;
  list->sums[i].bytes += pynccl_bytes(call);
  return 0;
}

static int pynccl_append(pynccl_list* list, const pynccl_call* call, int wait) {
  pynccl_call* calls = pynccl_room(list->calls, list->count, &list->capacity, sizeof *calls);
  if (!calls) return PYNCCL_NO_MEMORY;
  list->calls = calls;
  int r = pynccl_add_use(list, call->comm, call->stream, wait);
  if (!r) r = pynccl_add_to_sum(list, call);
  if (!r) calls[list->count++] = *call;
  return r;
}

int pynccl_list_extend(pynccl_list* list, const pynccl_list* more) {
  int r = 0;
  for (int i = 0; i < more->use_count && !r; ++i)
    r = pynccl_add_use(list, more->uses[i].comm, more->uses[i].stream, more->uses[i].wait);
  for (int i = 0; i < more->count && !r; ++i) r = pynccl_append(list, &more->calls[i], 0);
  return r;
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
  pynccl_digest_add(comm->trace, digest);
  return digest;
}

void pynccl_list_digest(pynccl_list* list) {
  if (list->count < 2) return;
  int made = 1;
  for (int i = 0; i < list->use_count && made; ++i) {
    pynccl_use* use = &list->uses[i];
    if (use->first && use->comm->trace) made = (use->digest = pynccl_digest_new(use->comm, list)) != NULL;
  }
  list->digested = made;
  for (int i = 0; i < list->use_count && !made; ++i) {
    if (list->uses[i].digest) pynccl_digest_drop(list->uses[i].comm->trace, list->uses[i].digest);
    list->uses[i].digest = NULL;
  }
}

void pynccl_list_leave(pynccl_list* list) {
  for (int i = 0; i < list->use_count; ++i)
    if (list->uses[i].first) pynccl_leave(list->uses[i].comm);
}

int pynccl_list_leave_mine(pynccl_list* list) {
  int mine = 0;
  for (int i = 0; i < list->use_count; ++i)
    if (list->uses[i].first) mine |= pynccl_leave_mine(list->uses[i].comm);
  return mine;
}

static int pynccl_list_enter(pynccl_list* list, int (*enter)(pynccl_comm*)) {
  for (int i = 0; i < list->use_count; ++i) {
    const int r = list->uses[i].first ? enter(list->uses[i].comm) : 0;
    if (!r) continue;
    while (i-- > 0)
      if (list->uses[i].first) pynccl_leave(list->uses[i].comm);
    return r;
  }
  return 0;
}

int pynccl_list_set_stream(pynccl_list* list, uintptr_t stream) {
  // Another thread may be running it.
  int r = pynccl_list_enter(list, pynccl_enter_anyway);
  if (r) return r;
  pynccl_list fresh = {0};
  for (int i = 0; i < list->count && !r; ++i) r = pynccl_add_use(&fresh, list->calls[i].comm, stream, 0);
  if (!r)
    for (int i = 0; i < list->count; ++i) list->calls[i].stream = stream;
  // Swap the arrays, so that no communicator loses its last reference in between.
  const pynccl_list dropped = {.uses = list->uses, .use_count = list->use_count};
  if (!r) {
    list->uses = fresh.uses;
    list->use_count = fresh.use_count;
    list->use_capacity = fresh.use_capacity;
    fresh.uses = dropped.uses;
    fresh.use_count = dropped.use_count;
  }
  pynccl_list_leave(list);
  pynccl_list_clear(&fresh);
  free(fresh.uses);
  if (!r && list->digested) pynccl_list_digest(list);
  return r;
}

static void pynccl_tally_group(const pynccl_list* list) {
  for (int i = 0; i < list->sum_count && list->failed < 0; ++i) {
    const pynccl_sum* sum = &list->sums[i];
    pynccl_tally_calls(sum->comm, sum->kind, sum->calls, sum->bytes);
  }
  // The calls behind the one that failed were not made.
  for (int i = 0; i <= list->failed; ++i)
    pynccl_tally_calls(list->calls[i].comm, list->calls[i].kind, 1, pynccl_bytes(&list->calls[i]));
  if (list->failed < 0) return;
  const pynccl_call* failed = &list->calls[list->failed];
  pynccl_raise(&failed->comm->tallies[failed->kind].failed, 1);
}

static int pynccl_group_run(pynccl_list* list, ncclSimInfo_t* estimate) {
  list->failed = -1;
  int r = ncclGroupStart();
  if (r) return r;
  for (int i = 0; i < list->count; ++i) {
    r = pynccl_run(&list->calls[i]);
    if (r && r != ncclInProgress) {
      list->failed = i;
      break;
    }
    r = 0;
  }
  if (!estimate) pynccl_tally_group(list);
  // After a failure, too: NCCL then leaves the group and launches nothing.
  const int end = estimate ? ncclGroupSimulateEnd(estimate) : ncclGroupEnd();
  return r ? r : end;
}

static uint64_t pynccl_groups;

static int pynccl_is_traced(const pynccl_list* list) {
  for (int i = 0; i < list->use_count; ++i)
    if (list->uses[i].comm->trace) return 1;
  return 0;
}

// Record what a list is about to run: one record on each communicator for a plan, else one for every call.
static void pynccl_trace_list(pynccl_list* list, uint64_t now) {
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

static void pynccl_trace_list_result(const pynccl_list* list, int result, int waits, uint64_t end) {
  int waited = list->use_count > 0;
  for (int i = 0; i < list->use_count; ++i) waited &= waits & list->uses[i].wait;
  for (int i = 0; i < list->use_count; ++i) {
    const pynccl_use* use = &list->uses[i];
    pynccl_trace* t = use->comm->trace;
    if (!use->first || !t) continue;
    const uint64_t oldest = pynccl_trace_oldest(t, t->next);
    for (uint64_t at = use->traced > oldest ? use->traced : oldest; at < t->next; ++at)
      pynccl_trace_result(pynccl_trace_at(t, at), result, waited ? end : 0);
  }
}

// A group waits as a whole: its time belongs to none of its calls.
static void pynccl_tally_list(const pynccl_list* list, int result, uint64_t ticks) {
  for (int i = 0; i < list->use_count; ++i) {
    const pynccl_use* use = &list->uses[i];
    pynccl_tally* tally = &use->comm->tallies[PYNCCL_PLAN];
    if (use->first) pynccl_raise(&tally->calls, 1);
    if (use->first && pynccl_is_failure(result)) pynccl_raise(&tally->failed, 1);
    if (use->first && use->wait) pynccl_raise(&tally->waited, ticks);
  }
}

int pynccl_list_run(pynccl_list* list, int may_wait) {
  if (pynccl_recording) {
    const int r = pynccl_list_extend(pynccl_recording, list);
    return r ? r : PYNCCL_RECORDED;
  }
  if (list->count == 1 && !list->grouped) return pynccl_issue_alone(list->calls, may_wait & list->uses->wait);
  int r = pynccl_list_enter(list, pynccl_enter);
  if (r) return r;
  const int traced = pynccl_is_traced(list);
  int waits = 0, resumes = 0;
  for (int i = 0; i < list->use_count; ++i) waits |= may_wait & list->uses[i].wait;
  for (int i = 0; i < list->use_count; ++i) resumes |= pynccl_watch_resumes(list->uses[i].comm);
  const uint64_t begin = traced || waits ? pynccl_ticks() : 0;
  // Before the announcements: check mode may wait there.
  if (traced && !resumes) pynccl_trace_list(list, begin);
  // Announce on all communicators before waiting on any.
  for (int i = 0; i < list->use_count && !r; ++i)
    if (list->uses[i].first && list->uses[i].comm->watch)
      r = pynccl_watch_announce(list->uses[i].comm, list->calls, list->count);
  for (int i = 0; i < list->use_count && !r; ++i)
    if (list->uses[i].first && list->uses[i].comm->watch) r = pynccl_watch_compare(list->uses[i].comm);
  if (r) {
    int missing = pynccl_may_go_on(r);
    for (int i = 0; i < list->use_count; ++i) missing |= pynccl_misses_ranks(list->uses[i].comm);
    if (traced && !missing) pynccl_trace_list_result(list, ncclInvalidUsage, 0, 0);
    pynccl_list_leave(list);
    return r;
  }
  for (int i = 0; i < list->use_count; ++i)
    if (list->uses[i].first && list->uses[i].comm->watch)
      pynccl_watch_begin(list->uses[i].comm, list->calls, list->count);
  if (list->count) r = pynccl_group_run(list, NULL);
  for (int i = 0; i < list->use_count; ++i) {
    const pynccl_use* use = &list->uses[i];
    pynccl_use_stream(use->comm, use->stream, r);
    if (use->comm->watch && !(may_wait & use->wait) && !r) pynccl_watch_issued(use->comm, use->stream);
  }
  for (int i = 0; i < list->use_count; ++i)
    if (list->uses[i].comm->watch) pynccl_watch_end(list->uses[i].comm);
  for (int i = 0; i < list->use_count && !r; ++i)
    if (may_wait & list->uses[i].wait) r = pynccl_wait(list->uses[i].comm->handle, list->uses[i].stream);
  const uint64_t end = waits ? pynccl_ticks() : 0;
  if (traced) pynccl_trace_list_result(list, r, may_wait, end);
  pynccl_tally_list(list, r, waits ? end - begin : 0);
  if (r != PYNCCL_WAITING) pynccl_list_leave(list);
  return r;
}

int pynccl_list_run_recorded(pynccl_list* list) {
  const int r = pynccl_list_run(list, 1);
  if (!r) pynccl_list_clear(list);
  return r;
}

// Estimate the time of the list as a group; nothing is launched.
int pynccl_list_simulate(pynccl_list* list, ncclSimInfo_t* estimate) {
  int r = pynccl_list_enter(list, pynccl_enter);
  if (r) return r;
  r = pynccl_group_run(list, estimate);
  pynccl_list_leave(list);
  return r;
}
