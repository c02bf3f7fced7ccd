#include "base/device.hpp"

#include "base/log.hpp"
#include "base/params.hpp"

namespace pncpu {
namespace {
thread_local int t_device = 0;
}

int default_device() { return t_device; }

void set_default_device(int device) { t_device = device; }

int shared_devices() { return param_is_set("PYNCCL_CPU_DEVICES") ? int(param_int("PYNCCL_CPU_DEVICES")) : 0; }

bool sharing_allowed() { return param_int("NCCL_MULTI_RANK_GPU_ENABLE") != 0; }

ncclResult_t check_device(int device, const char* function, const char* what) {
  int count = shared_devices();
  if (device < 0 && !count)
    return fail_in(function, ncclInvalidArgument, "%s is %d, expected 0 or more", what, device);
  if (device < 0 || (count && device >= count))
    return fail_in(function, ncclInvalidArgument, "%s is %d, expected 0 to %d: PYNCCL_CPU_DEVICES is %d",
                   what, device, count - 1, count);
  return ncclSuccess;
}

}  // namespace pncpu
