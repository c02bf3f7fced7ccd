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

// Call once for each operation of a communicator. `call` counts from 1; call 1 reads the variable again.
// Sleeps and dies inside.
Fault fault_point(int rank, uint64_t call);

// Why PYNCCL_CPU_FAULT (read again) is malformed, or nullptr. A malformed value injects nothing and is logged
// once at Warn. The text is valid forever.
const char* fault_error();

}  // namespace pncpu
