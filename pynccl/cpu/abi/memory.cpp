// The C API: memory, registrations, reduction operators, suspension, and queries of a communicator.
#include <algorithm>

#include "base/allocations.hpp"
#include "calls/group.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

// All ranks stop together: the rings must be idle when their memory is released.
ncclResult_t suspend(Comm& comm, const Meeting (&meetings)[3]) {
  std::vector<std::string> all;
  comm.drain(kForever);
  if (ncclResult_t r = meetings[0].meet("", &all); r != ncclSuccess) return r;
  char busy = 0;
  for (int q = 0; q < comm.nranks; ++q)
    if (q != comm.rank && comm.peer(q).local >= 0)
      for (auto& pipe : comm.peer(q).link.pipe) busy = busy || !pipe->idle();
  if (ncclResult_t r = meetings[1].meet(std::string(1, busy), &all); r != ncclSuccess) return r;
  for (int q = 0; q < comm.nranks; ++q)
    if (all[size_t(q)] != std::string(1, '\0'))
      return fail_in("ncclCommSuspend", ncclInvalidUsage, "rank %d has messages that were not received", q);
  if (comm.segment() && comm.session.local_index() == 0) comm.segment()->release_rings();
  if (ncclResult_t r = meetings[2].meet("", &all); r != ncclSuccess) return r;
  comm.comm_state.phase.store(Phase::Suspended);
  comm.comm_state.set_pending(ncclSuccess);
  return ncclSuccess;
}

// No rank may use the rings before all ranks have called resume.
ncclResult_t resume(Comm& comm, const Meeting& meeting) {
  std::vector<std::string> all;
  if (ncclResult_t r = meeting.meet("", &all); r != ncclSuccess) return r;
  Phase suspended = Phase::Suspended;
  comm.comm_state.phase.compare_exchange_strong(suspended, Phase::Ready);
  return ncclSuccess;
}

}  // namespace
}  // namespace pncpu

using namespace pncpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return fail_in("ncclGetVersion", ncclInvalidArgument, "version is NULL");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the developers of this library";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclTimeout:
      return "operation timed out";
    case ncclNumResults:
      break;
  }
  return "unknown result code";
}

void ncclResetDebugInit(void) { reset_debug(); }

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  return guarded("ncclMemAlloc", [&] {
    REQUIRE_POINTER("ncclMemAlloc", ptr);
    *ptr = nullptr;
    if (size == 0) return ncclSuccess;  // as cudaMalloc
    if (size > SIZE_MAX / 2) return fail_in("ncclMemAlloc", ncclInvalidArgument, "size is %zu", size);
    return per_process<Allocations>().allocate(size, ptr);
  });
}

ncclResult_t ncclMemFree(void* ptr) {
  if (!ptr) return ncclSuccess;
  return guarded("ncclMemFree", [&] { return per_process<Allocations>().free(ptr); });
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  const char* function = "ncclCommRegister";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, function, &c); r != ncclSuccess) return r;
    REQUIRE_POINTER(function, handle);
    *handle = nullptr;
    REQUIRE_POINTER(function, buff);
    bool first = false;
    *handle = c->registry.add_buffer({c->serial, buff, size, 0}, &first);
    if (first) c->lend(*handle, buff, size);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  const char* function = "ncclCommDeregister";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, function, &c); r != ncclSuccess) return r;
    bool last = false;
    if (!handle) return ncclSuccess;
    if (c->registry.remove_buffer(handle, &last)) {
      if (last) c->take_back(handle);
      return ncclSuccess;
    }
    return fail_in(function, ncclInvalidUsage,
                   "handle %p is not one that ncclCommRegister gave for this comm", handle);
  });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  const char* function = "ncclRedOpCreatePreMulSum";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, function, &c); r != ncclSuccess) return r;
    REQUIRE_POINTER(function, op);
    REQUIRE_POINTER(function, scalar);
    if (unsigned(datatype) >= ncclNumTypes)
      return fail_in(function, ncclInvalidArgument, "datatype is %d", int(datatype));
    if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
      return fail_in(function, ncclInvalidArgument, "residence is %d", int(residence));
    RedOp made{datatype, {}, residence == ncclScalarDevice ? scalar : nullptr};
    if (residence == ncclScalarHostImmediate) memcpy(made.scalar.bytes, scalar, type_size(datatype));
    *op = ncclRedOp_t(c->registry.add_op(made));
    return ncclSuccess;
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return guarded("ncclRedOpDestroy", [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, "ncclRedOpDestroy", &c); r != ncclSuccess) return r;
    if (!c->registry.remove_op(int(op)))
      return fail_in("ncclRedOpDestroy", ncclInvalidArgument,
                     "op %d was not created by this communicator, or was destroyed", int(op));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  const char* function = "ncclCommSuspend";
  return in_group(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, function, &c); r != ncclSuccess) return r;
    if (!(flags & NCCL_SUSPEND_MEM)) return ncclSuccess;  // no resource to suspend
    if (c->comm_state.phase.load() != Phase::Ready)
      return fail_in(function, ncclInvalidUsage, "comm is suspended or finalized already");
    auto meeting = [&] { return Meeting(c, Meeting::everyone(*c), function); };
    struct Three {
      Meeting of[3];
    } three{{meeting(), meeting(), meeting()}};
    return submit(Job{function, [c, three] { return suspend(*c, three.of); }, c, {}, c->blocking});
  });
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  const char* function = "ncclCommResume";
  return in_group(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, function, &c); r != ncclSuccess) return r;
    if (c->comm_state.phase.load() != Phase::Suspended)
      return fail_in(function, ncclInvalidUsage, "comm is not suspended");
    Meeting meeting(c, Meeting::everyone(*c), function);
    return submit(Job{function, [c, meeting] { return resume(*c, meeting); }, c, {}, c->blocking});
  });
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  return guarded("ncclCommMemStats", [&]() -> ncclResult_t {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, "ncclCommMemStats", &c); r != ncclSuccess) return r;
    if (!value) return fail_in("ncclCommMemStats", ncclInvalidArgument, "value is NULL");
    uint64_t rings = 0, rest = sizeof(Comm);
    if (Segment* s = c->segment()) {
      rings = s->rings_bytes();
      rest += s->bytes() - rings;
    }
    switch (stat) {
      case ncclStatGpuMemSuspend:
        return *value = rings, ncclSuccess;
      case ncclStatGpuMemSuspended:
        return *value = c->comm_state.phase.load() == Phase::Suspended, ncclSuccess;
      case ncclStatGpuMemPersist:
        return *value = rest, ncclSuccess;
      case ncclStatGpuMemTotal:
        return *value = rings + rest, ncclSuccess;
    }
    return fail_in("ncclCommMemStats", ncclInvalidArgument, "stat is %d", int(stat));
  });
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props) {
  return guarded("ncclCommQueryProperties", [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, "ncclCommQueryProperties", &c); r != ncclSuccess) return r;
    if (!props) return fail_in("ncclCommQueryProperties", ncclInvalidArgument, "props is NULL");
    if (props->magic != NCCL_API_MAGIC || props->size < offsetof(ncclCommProperties_t, rank))
      return fail_in("ncclCommQueryProperties", ncclInvalidUsage,
                     "props is not initialized (magic 0x%x, size %zu)", props->magic, props->size);
    ncclCommProperties_t full;
    memset(&full, 0, sizeof full);
    full.size = props->size;
    full.magic = props->magic;
    full.version = props->version;
    full.rank = c->rank;
    full.nRanks = c->nranks;
    full.cudaDev = c->device;
    full.nvmlDev = -1;
    full.nLsaTeams = c->nranks / c->session.lsa_size();
    full.commHash = c->session.hash;
    memcpy(props, &full, std::min(sizeof full, props->size));
    return ncclSuccess;
  });
}

}  // extern "C"
