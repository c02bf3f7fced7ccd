// The C API: groups.
#include "calls/group.hpp"

using namespace pncpu;

extern "C" {

ncclResult_t ncclGroupStart(void) {
  ++this_thread_group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  return guarded("ncclGroupEnd", [] {
    Group& group = this_thread_group();
    if (group.depth == 0)
      return fail(ncclInvalidUsage, "ncclGroupEnd: no ncclGroupStart came before it on this thread");
    return --group.depth > 0 ? ncclSuccess : group.finish();
  });
}

// As in NCCL nothing is issued.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  return guarded("ncclGroupSimulateEnd", [&] {
    Group& group = this_thread_group();
    if (group.depth == 0)
      return fail(ncclInvalidUsage, "ncclGroupSimulateEnd: no ncclGroupStart came before it");
    if (info && (info->magic != NCCL_SIM_INFO_MAGIC || info->size < sizeof *info))
      return fail(ncclInvalidArgument,
                  "ncclGroupSimulateEnd: simInfo is not initialized (magic 0x%x, size %zu)", info->magic,
                  info->size);
    if (--group.depth > 0) return ncclSuccess;
    float us = -1.0f;
    ncclResult_t r = group.simulate(&us);
    if (info) info->estimatedTime = us;
    return r;
  });
}

}  // extern "C"
