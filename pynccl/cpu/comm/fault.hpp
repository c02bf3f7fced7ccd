// Fault injection for tests: PYNCCL_CPU_FAULT="rank=R,call=K,action=A[;...]", A one of die, drop,
// sleep:SECONDS, fail:RESULT (a name such as ncclRemoteError, or a number).
#pragma once

#include <cstdint>

#include "base/nccl.hpp"

namespace pncpu {

enum class FaultAction { None, Fail, Drop };

struct Fault {
  FaultAction action;
  ncclResult_t result;
};

// To be called once for each operation call of a communicator; `call` counts from 1, and the variable is read
// again at call 1. Sleeps and dies inside.
Fault fault_point(int rank, uint64_t call);

// What is wrong with PYNCCL_CPU_FAULT (read again), or nullptr. A malformed value injects nothing and is told
// once at Warn. The text lives for ever.
const char* fault_error();

}  // namespace pncpu
