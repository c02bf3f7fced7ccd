// The kinds of calls, and of what else the flight recorder records: one row each, with its number, its name
// in messages and dumps, the C function, and what its arguments include. The numbers travel between ranks.
// tools/generate_api.py derives _library/generated/kinds.py from the rows.
#pragma once

enum { PYNCCL_REDUCES = 1, PYNCCL_HAS_ROOT = 2 };

#define PYNCCL_KINDS(X)                                                       \
  X(ALL_REDUCE, 0, "all_reduce", "ncclAllReduce", PYNCCL_REDUCES)             \
  X(REDUCE, 1, "reduce", "ncclReduce", PYNCCL_REDUCES | PYNCCL_HAS_ROOT)      \
  X(BROADCAST, 2, "broadcast", "ncclBroadcast", PYNCCL_HAS_ROOT)              \
  X(ALL_GATHER, 3, "all_gather", "ncclAllGather", 0)                          \
  X(REDUCE_SCATTER, 4, "reduce_scatter", "ncclReduceScatter", PYNCCL_REDUCES) \
  X(ALL_TO_ALL, 5, "all_to_all", "ncclAlltoAll", 0)                           \
  X(GATHER, 6, "gather", "ncclGather", PYNCCL_HAS_ROOT)                       \
  X(SCATTER, 7, "scatter", "ncclScatter", PYNCCL_HAS_ROOT)                    \
  X(SEND, 8, "send", "ncclSend", 0)                                           \
  X(RECV, 9, "recv", "ncclRecv", 0)                                           \
  X(BARRIER, 10, "barrier", "barrier", 0)                                     \
  X(PUT_SIGNAL, 11, "put_signal", "ncclPutSignal", 0)                         \
  X(SIGNAL, 12, "signal", "ncclSignal", 0)                                    \
  X(WAIT_SIGNAL, 13, "wait_signal", "ncclWaitSignal", 0)                      \
  X(WINDOW, 14, "window", "ncclCommWindowRegister", 0)                        \
  X(CLOSE_WINDOW, 15, "close_window", "ncclCommWindowDeregister", 0)          \
  X(PLAN, 16, "plan", "", 0)                                                  \
  X(INIT, 17, "init", "", 0)                                                  \
  X(SPLIT, 18, "split", "ncclCommSplit", 0)                                   \
  X(SHRINK, 19, "shrink", "ncclCommShrink", 0)                                \
  X(GROW, 20, "grow", "ncclCommGrow", 0)                                      \
  X(FINALIZE, 21, "finalize", "ncclCommFinalize", 0)                          \
  X(DESTROY, 22, "destroy", "ncclCommDestroy", 0)                             \
  X(SUSPEND, 23, "suspend", "ncclCommSuspend", 0)                             \
  X(RESUME, 24, "resume", "ncclCommResume", 0)                                \
  X(ABORT, 25, "abort", "ncclCommAbort", 0)                                   \
  X(REVOKE, 26, "revoke", "ncclCommRevoke", 0)

// The array calls come first, then the barrier (an all_reduce of one byte), the one-sided calls, the exchange
// before a window is registered or deregistered (an all_gather), and the life of a communicator.
#define PYNCCL_ENUMERATOR(kind, number, name, function, arguments) PYNCCL_##kind = number,
enum pynccl_kind { PYNCCL_KINDS(PYNCCL_ENUMERATOR) };
#undef PYNCCL_ENUMERATOR
