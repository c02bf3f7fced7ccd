// Virtual devices. By default every rank has a device of its own, whatever its number, since a CPU has no
// devices to share. PYNCCL_CPU_DEVICES=N makes N shared devices, as GPUs are.
#pragma once

#include "base/nccl.hpp"

namespace pncpu {

int default_device();  // of this thread
// 0: every rank has its own device.
int shared_devices();
// Whether ranks may share a device (NCCL_MULTI_RANK_GPU_ENABLE).
bool sharing_allowed();
// `what` names the argument in the error.
ncclResult_t check_device(int device, const char* function, const char* what);
void set_default_device(int device);

}  // namespace pncpu
