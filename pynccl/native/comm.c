#include "comm.h"

#include <stdlib.h>

#include "ring.h"

pynccl_comm* pynccl_comm_new(void) {
  pynccl_trace_start_clock();
  pynccl_comm* comm = calloc(1, sizeof *comm + (PYNCCL_PLAN + 1) * sizeof *comm->tallies);
  if (comm) *comm = (pynccl_comm){.references = 1, .size = 1, .tallies = (pynccl_tally*)(comm + 1)};
  return comm;
}

void pynccl_comm_release(pynccl_comm* comm) {
  if (!comm || __atomic_sub_fetch(&comm->references, 1, __ATOMIC_ACQ_REL)) return;
  if (comm->watch) comm->unwatch(comm);
  if (comm->trace) pynccl_trace_close(comm->trace);
  for (pynccl_used *entry = comm->used, *next; entry; entry = next) {
    next = entry->next;
    free(entry);
  }
  free(comm);
}

// --- streams with calls ------------------------------------------------------------------------------------

static uint64_t read(const uint64_t* number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }

static pynccl_used* entry_of(const pynccl_comm* comm, uintptr_t stream) {
  pynccl_used* entry = __atomic_load_n(&comm->used, __ATOMIC_ACQUIRE);
  while (entry && __atomic_load_n(&entry->stream, __ATOMIC_ACQUIRE) != stream) entry = entry->next;
  return entry;
}

// An entry without a stream: one whose calls are settled, or a new one; NULL without memory.
static pynccl_used* free_entry(pynccl_comm* comm) {
  pynccl_comm_settle(comm);
  for (pynccl_used* entry = comm->used; entry; entry = entry->next)
    if (entry->settled >= entry->last) return entry;
  pynccl_used* made = calloc(1, sizeof *made);
  if (!made) return NULL;
  made->next = comm->used;
  // Other threads find it by its stream only, which no caller has before its first call.
  __atomic_store_n(&comm->used, made, __ATOMIC_RELEASE);
  return made;
}

void pynccl_comm_use(pynccl_comm* comm, uintptr_t stream) {
  pynccl_used* entry = comm->used;
  while (entry && entry->stream != stream) entry = entry->next;
  if (!entry) {
    entry = free_entry(comm);
    if (!entry) {
      // A later synchronize() of all streams misses this one; the call itself succeeds.
      comm->unlisted = 1;
      return;
    }
    __atomic_store_n(&entry->stream, stream, __ATOMIC_RELEASE);
  }
  __atomic_store_n(&entry->last, ++comm->issued, __ATOMIC_RELEASE);
}

uint64_t pynccl_comm_newest(const pynccl_comm* comm, uintptr_t stream) {
  const pynccl_used* entry = entry_of(comm, stream);
  if (!entry) return 0;
  const uint64_t last = read(&entry->last);
  // Meanwhile the entry may have become another stream's.
  const int same = __atomic_load_n(&entry->stream, __ATOMIC_ACQUIRE) == stream;
  return same && last > read(&entry->waited) ? last : 0;
}

void pynccl_comm_waited(pynccl_comm* comm, uintptr_t stream, uint64_t number) {
  pynccl_used* entry = entry_of(comm, stream);
  uint64_t known = entry ? read(&entry->waited) : number;
  while (known < number && !__atomic_compare_exchange_n(&entry->waited, &known, number, 0, __ATOMIC_RELEASE,
                                                        __ATOMIC_RELAXED)) {
  }
}

void pynccl_comm_settle(pynccl_comm* comm) {
  for (pynccl_used* entry = comm->used; entry; entry = entry->next) {
    if (entry->settled >= entry->last || read(&entry->waited) < entry->last) continue;
    if (comm->trace) pynccl_trace_complete(comm->trace, entry->stream, comm->trace->next, 0);
    entry->settled = entry->last;
  }
}

void pynccl_comm_abandon(pynccl_comm* comm, uintptr_t stream) {
  pynccl_used* entry = entry_of(comm, stream);
  if (!entry) return;
  pynccl_comm_waited(comm, stream, entry->last);
  entry->settled = entry->last;
}

void pynccl_comm_forget(pynccl_comm* comm, uintptr_t stream) {
  pynccl_comm_abandon(comm, stream);
  if (comm->trace) pynccl_trace_complete(comm->trace, stream, comm->trace->next, 0);
}

void pynccl_comm_failed(pynccl_comm* comm, uintptr_t stream, int result) {
  if (comm->trace) pynccl_trace_complete(comm->trace, stream, comm->trace->next, result);
}

uint64_t pynccl_comm_position(const pynccl_comm* comm) { return comm->trace ? comm->trace->next : 0; }
