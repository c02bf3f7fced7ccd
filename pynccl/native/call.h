// A call: its kind and its arguments. All layers pass this struct on.
#pragma once

#include "kinds.h"
#include "library.h"

typedef struct pynccl_comm pynccl_comm;

enum { PYNCCL_SIGNAL_BITS = 16 };

typedef struct pynccl_call {
  pynccl_comm* comm;
  int kind;
  int datatype;
  int op;    // of a one-sided call: the signal, and above PYNCCL_SIGNAL_BITS the context
  int root;  // the peer of a send, a recv or a one-sided call
  uintptr_t send;
  uintptr_t recv;  // of a put: the offset in the peer's window, in bytes
  size_t count;    // of a wait: how many signals
  uintptr_t stream;
  const ncclCollConfig_t* config;
  const uintptr_t* window;  // of a put: the handle; 0 once the window is closed
  unsigned caller;          // a number of pynccl_trace_intern
} pynccl_call;
