// Virtual devices. By default a rank's device is its own, whatever its number, since a CPU has none to share;
// PYNCCL_CPU_DEVICES=N makes N of them that are shared, as GPUs are.
#pragma once

#include "base/nccl.hpp"

namespace pncpu {

int default_device();  // of this thread
// 0: every rank has its own.
int shared_devices();
// Whether ranks may share one (NCCL_MULTI_RANK_GPU_ENABLE).
bool sharing_allowed();
// fail() names `what`.
ncclResult_t check_device(int device, const char* function, const char* what);
void set_default_device(int device);

}  // namespace pncpu
