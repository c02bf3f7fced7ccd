// A call: its kind and its arguments, the struct that all layers hand on.
#pragma once

#include "library.h"

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
