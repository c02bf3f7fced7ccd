// A call: its kind and its arguments. All layers pass this struct on.
#pragma once

#include "kinds.h"
#include "library.h"

typedef struct pynccl_comm pynccl_comm;

typedef struct pynccl_call {
  pynccl_comm* comm;
  int kind;
  int datatype;
  int op;
  int root;  // the peer of a send or recv
  uintptr_t send;
  uintptr_t recv;
  size_t count;
  uintptr_t stream;
  const ncclCollConfig_t* config;
  unsigned caller;  // a number of pynccl_trace_intern
} pynccl_call;
