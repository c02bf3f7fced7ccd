#include "names.h"

#include "recorder.h"

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

const char* pynccl_kind_name(int kind) {
  const int known = kind >= 0 && kind < (int)(sizeof pynccl_kind_names / sizeof *pynccl_kind_names);
  return known && pynccl_kind_names[kind] ? pynccl_kind_names[kind] : "something unknown";
}
