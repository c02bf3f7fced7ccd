// A call: its kind and its arguments, the struct that all layers hand on.
#pragma once

#include "kinds.h"
#include "library.h"

typedef struct pynccl_comm pynccl_comm;

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
