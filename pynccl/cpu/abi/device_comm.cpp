// The C API: device communicators, which only kernels can use, and what the CPU library answers without any.
#include <climits>

#include "calls/group.hpp"
#include "comm/window.hpp"

using namespace pncpu;

namespace {

ncclResult_t no_kernels(const char* function) {
  return guarded(function, [&] {
    return fail_in(function, ncclInvalidUsage,
                   "the CPU library has no device communicators, since no kernels run on it");
  });
}

ncclResult_t no_fabric(const char* function) {
  return guarded(function, [&] {
    return fail_in(function, ncclInvalidUsage,
                   "the CPU library has no CFT (ncclCommProperties_t.cftSupport is false)");
  });
}

ncclTeam_t no_team(const char* function) {
  no_fabric(function);
  return {};
}

// NCCL's src/dev_runtime.cc: without multicast memory the pointer is NULL, and that is no error.
ncclResult_t no_multimem(const char* function, ncclWindow_t window, void** out) {
  return guarded(function, [&]() -> ncclResult_t {
    REQUIRE_POINTER(function, out);
    *out = nullptr;
    return find_handle<Window>(window, function) ? ncclSuccess : ncclInvalidArgument;
  });
}

}  // namespace

extern "C" {

ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements_t*, ncclDevComm_t*) {
  return no_kernels("ncclDevCommCreate");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm_t*) { return no_kernels("ncclDevCommDestroy"); }

ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t, int, ncclLsaBarrierHandle_t*,
                                             ncclDevResourceRequirements_t*) {
  return no_kernels("ncclLsaBarrierCreateRequirement");
}

ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t, ncclTeam_t, int, ncclGinBarrierHandle_t*,
                                             ncclDevResourceRequirements_t*) {
  return no_kernels("ncclGinBarrierCreateRequirement");
}

// NCCL's src/nccl_device/ll_a2a.cc: a slot has 8 bytes.
int ncclLLA2ACalcSlots(int maxElts, int maxEltSize) {
  if (maxElts < 0 || maxEltSize < 0 || int64_t(maxElts) * ((int64_t(maxEltSize) + 7) / 8) > INT_MAX) {
    fail_in("ncclLLA2ACalcSlots", ncclInvalidArgument, "maxElts is %d and maxEltSize %d", maxElts,
            maxEltSize);
    return -1;
  }
  return maxElts * ((maxEltSize + 7) / 8);
}

ncclResult_t ncclLLA2ACreateRequirement(int, int, ncclLLA2AHandle_t*, ncclDevResourceRequirements_t*) {
  return no_kernels("ncclLLA2ACreateRequirement");
}

ncclResult_t ncclGinOutboxCreateRequirement(int, int, ncclGinOutboxHandle*, ncclDevResourceRequirements_t*) {
  return no_kernels("ncclGinOutboxCreateRequirement");
}

ncclResult_t ncclGinInboxA2ACreateRequirement(ncclTeam_t, int, int, ncclGinInboxA2AHandle*,
                                              ncclDevResourceRequirements_t*) {
  return no_kernels("ncclGinInboxA2ACreateRequirement");
}

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t, void** outPtr) {
  return no_multimem("ncclGetLsaMultimemDevicePointer", window, outPtr);
}

ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t window, size_t, ncclMultimemHandle_t, void** outPtr) {
  return no_multimem("ncclGetMultimemDevicePointer", window, outPtr);
}

ncclResult_t ncclGetMultimemDeviceLeInfo(ncclWindow_t, size_t, ncclCftLeId*, size_t*) {
  return no_fabric("ncclGetMultimemDeviceLeInfo");
}

ncclResult_t ncclGetCftDeviceLeInfo(ncclWindow_t, size_t, int, ncclTeam_t, ncclCftLeId*, size_t*) {
  return no_fabric("ncclGetCftDeviceLeInfo");
}

ncclResult_t ncclGetPeerDeviceLeInfo(ncclWindow_t, size_t, int, ncclCftLeId*, size_t*) {
  return no_fabric("ncclGetPeerDeviceLeInfo");
}

ncclTeam_t ncclTeamCft(ncclComm_t, ncclCftTeamMode_t) { return no_team("ncclTeamCft"); }

ncclTeam_t ncclTeamCftMultimem(ncclComm_t) { return no_team("ncclTeamCftMultimem"); }

}  // extern "C"
