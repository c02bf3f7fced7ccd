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
  free(comm->used);
  free(comm);
}

void pynccl_comm_abandon(pynccl_comm* comm, uintptr_t stream) {
  for (int i = 0; i < comm->used_count; ++i)
    if (comm->used[i] == stream) comm->used[i] = comm->used[--comm->used_count];
}

void pynccl_comm_forget(pynccl_comm* comm, uintptr_t stream) {
  pynccl_comm_abandon(comm, stream);
  if (comm->trace) pynccl_trace_complete(comm->trace, stream, comm->trace->next, 0);
}

void pynccl_comm_failed(pynccl_comm* comm, uintptr_t stream, int result) {
  if (comm->trace) pynccl_trace_complete(comm->trace, stream, comm->trace->next, result);
}

uint64_t pynccl_comm_position(const pynccl_comm* comm) { return comm->trace ? comm->trace->next : 0; }
