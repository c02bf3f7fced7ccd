// The C API: groups.
#include "calls/group.hpp"

using namespace pncpu;

extern "C" {

ncclResult_t ncclGroupStart(void) {
  return guarded("ncclGroupStart", [] { return ++this_thread_group().depth, ncclSuccess; });
}

ncclResult_t ncclGroupEnd(void) {
  return guarded("ncclGroupEnd", [] {
    Group& group = this_thread_group();
    if (group.depth == 0)
      return fail_in("ncclGroupEnd", ncclInvalidUsage, "no ncclGroupStart came before it on this thread");
    return --group.depth > 0 ? ncclSuccess : group.finish();
  });
}

// Without simInfo this is ncclGroupEnd. An invalid simInfo ends the group and nothing is issued
// (src/group.cc: ncclGroupEndInternal).
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  if (!info) return ncclGroupEnd();
  return guarded("ncclGroupSimulateEnd", [&] {
    Group& group = this_thread_group();
    if (group.depth == 0)
      return fail_in("ncclGroupSimulateEnd", ncclInvalidUsage, "no ncclGroupStart came before it");
    if (--group.depth > 0) return ncclSuccess;
    if (info->magic != NCCL_SIM_INFO_MAGIC || info->size < sizeof *info) {
      group.spoil(fail_in("ncclGroupSimulateEnd", ncclInvalidArgument,
                          "simInfo is not initialized (magic 0x%x, size %zu)", info->magic, info->size));
      return group.finish();
    }
    return group.simulate(&info->estimatedTime);
  });
}

}  // extern "C"
