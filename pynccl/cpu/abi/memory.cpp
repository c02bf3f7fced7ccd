// The C API: memory, registrations, windows, reduction operators, suspension, and what can be asked of a
// communicator.
#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "calls/group.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

constexpr size_t kPage = 4096;

struct Allocations {
  std::mutex mutex;
  std::map<void*, size_t> sizes;
};

template <class T>
ncclResult_t add_registration(ncclComm_t comm, const char* function, void* buffer, size_t size, int flags,
                              void** out) {
  std::shared_ptr<Comm> c = comm_of(comm, function);
  if (!c) return ncclInvalidArgument;
  if (!out) return fail(ncclInvalidArgument, "%s: %s is NULL", function, HandleTraits<T>::name);
  *out = nullptr;
  if (!buffer || size == 0)
    return fail(ncclInvalidArgument, "%s: buff is %p and size %zu, expected memory", function, buffer, size);
  *out = c->registry.add<T>(buffer, size, flags);
  return ncclSuccess;
}

template <class T>
ncclResult_t remove_registration(ncclComm_t comm, const char* function, void* handle) {
  std::shared_ptr<Comm> c = comm_of(comm, function);
  return c ? c->registry.remove<T>(handle, function) : ncclInvalidArgument;
}

// All ranks come to a halt together: nothing may be underway when the rings' memory goes.
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
      return fail(ncclInvalidUsage, "ncclCommSuspend: rank %d has messages that were not received", q);
  if (comm.segment() && comm.session.local_index() == 0) comm.segment()->release_rings();
  if (ncclResult_t r = meetings[2].meet("", &all); r != ncclSuccess) return r;
  comm.standing.phase.store(Phase::Suspended);
  comm.standing.set_pending(ncclSuccess);
  return ncclSuccess;
}

}  // namespace
}  // namespace pncpu

using namespace pncpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return fail(ncclInvalidArgument, "ncclGetVersion: version is NULL");
  *version = kVersion;
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
    if (size == 0 || size > SIZE_MAX / 2) return fail(ncclInvalidArgument, "ncclMemAlloc: size is %zu", size);
    Allocations& all = per_process<Allocations>();
    std::lock_guard<std::mutex> lock(all.mutex);
    size_t bytes = align_up(size, kPage);
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return fail(ncclSystemError, "ncclMemAlloc: %zu bytes: %s", size, strerror(errno));
    try {
      all.sizes[at] = bytes;
    } catch (...) {
      munmap(at, bytes);
      throw;
    }
    *ptr = at;
    return ncclSuccess;
  });
}

ncclResult_t ncclMemFree(void* ptr) {
  if (!ptr) return ncclSuccess;
  return guarded("ncclMemFree", [&] {
    Allocations& all = per_process<Allocations>();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto it = all.sizes.find(ptr);
    if (it == all.sizes.end())
      return fail(ncclInvalidArgument,
                  "ncclMemFree: %p was not returned by ncclMemAlloc in this process, or was freed before",
                  ptr);
    munmap(ptr, it->second);
    all.sizes.erase(it);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  return guarded("ncclCommRegister", [&] {
    return add_registration<Registration>(comm, "ncclCommRegister", buff, size, 0, handle);
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return guarded("ncclCommDeregister",
                 [&] { return remove_registration<Registration>(comm, "ncclCommDeregister", handle); });
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags) {
  const char* function = "ncclCommWindowRegister";
  return guarded(function, [&] {
    int known = NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING | NCCL_WIN_GIN_ONLY | NCCL_WIN_CFT_COUNTED;
    if (winFlags & ~known)
      return fail(ncclInvalidArgument, "%s: winFlags is 0x%x", function, unsigned(winFlags));
    if (reinterpret_cast<uintptr_t>(buff) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
      return fail(ncclInvalidArgument, "%s: buff is %p, expected a multiple of %d bytes", function, buff,
                  NCCL_WIN_REQUIRED_ALIGNMENT);
    return add_registration<Window>(comm, function, buff, size, winFlags, reinterpret_cast<void**>(win));
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  return guarded("ncclCommWindowDeregister",
                 [&] { return remove_registration<Window>(comm, "ncclCommWindowDeregister", win); });
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr) {
  return guarded("ncclWinGetUserPtr", [&] {
    std::shared_ptr<Comm> c = comm_of(comm, "ncclWinGetUserPtr");
    if (!c) return ncclInvalidArgument;
    REQUIRE_POINTER("ncclWinGetUserPtr", outUserPtr);
    std::shared_ptr<Window> window = c->registry.find<Window>(win, "ncclWinGetUserPtr");
    if (!window) return ncclInvalidArgument;
    *outUserPtr = window->buffer;
    return ncclSuccess;
  });
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  const char* function = "ncclRedOpCreatePreMulSum";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c = comm_of(comm, function);
    if (!c) return ncclInvalidArgument;
    REQUIRE_POINTER(function, op);
    REQUIRE_POINTER(function, scalar);
    if (unsigned(datatype) >= ncclNumTypes)
      return fail(ncclInvalidArgument, "%s: datatype is %d", function, int(datatype));
    if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
      return fail(ncclInvalidArgument, "%s: residence is %d", function, int(residence));
    RedOp made{datatype, {}, residence == ncclScalarDevice ? scalar : nullptr};
    if (residence == ncclScalarHostImmediate) memcpy(made.scalar.bytes, scalar, type_size(datatype));
    *op = ncclRedOp_t(c->registry.add_op(made));
    return ncclSuccess;
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return guarded("ncclRedOpDestroy", [&] {
    std::shared_ptr<Comm> c = comm_of(comm, "ncclRedOpDestroy");
    if (!c) return ncclInvalidArgument;
    if (!c->registry.remove_op(int(op)))
      return fail(ncclInvalidArgument,
                  "ncclRedOpDestroy: op %d was not created by this communicator, or was destroyed", int(op));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  const char* function = "ncclCommSuspend";
  return in_group(function, [&] {
    std::shared_ptr<Comm> c = comm_of(comm, function);
    if (!c) return ncclInvalidArgument;
    if (flags != NCCL_SUSPEND_MEM)
      return fail(ncclInvalidArgument, "%s: flags is 0x%x, expected NCCL_SUSPEND_MEM", function,
                  unsigned(flags));
    if (c->error() != ncclSuccess)
      return fail(c->error(), "%s: comm has failed: %s", function, c->error_text().c_str());
    if (c->standing.phase.load() != Phase::Ready)
      return fail(ncclInvalidUsage, "%s: comm is suspended or finalized already", function);
    auto meeting = [&] { return Meeting(c, Meeting::everyone(*c), function); };
    struct Three {
      Meeting of[3];
    } three{{meeting(), meeting(), meeting()}};
    Job job;
    job.comm = c;
    job.blocking = c->blocking;
    job.run = [c, three] { return suspend(*c, three.of); };
    return submit(std::move(job));
  });
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  return in_group("ncclCommResume", [&] {
    std::shared_ptr<Comm> c = comm_of(comm, "ncclCommResume");
    if (!c) return ncclInvalidArgument;
    Phase suspended = Phase::Suspended;
    if (!c->standing.phase.compare_exchange_strong(suspended, Phase::Ready))
      return fail(ncclInvalidUsage, "ncclCommResume: comm is not suspended");
    return ncclSuccess;
  });
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  return guarded("ncclCommMemStats", [&]() -> ncclResult_t {
    std::shared_ptr<Comm> c = comm_of(comm, "ncclCommMemStats");
    if (!c) return ncclInvalidArgument;
    if (!value) return fail(ncclInvalidArgument, "ncclCommMemStats: value is NULL");
    uint64_t rings = 0, rest = sizeof(Comm);
    if (Segment* s = c->segment()) {
      rings = s->rings_bytes();
      rest += s->bytes() - rings;
    }
    switch (stat) {
      case ncclStatGpuMemSuspend:
        return *value = rings, ncclSuccess;
      case ncclStatGpuMemSuspended:
        return *value = c->standing.phase.load() == Phase::Suspended, ncclSuccess;
      case ncclStatGpuMemPersist:
        return *value = rest, ncclSuccess;
      case ncclStatGpuMemTotal:
        return *value = rings + rest, ncclSuccess;
    }
    return fail(ncclInvalidArgument, "ncclCommMemStats: stat is %d", int(stat));
  });
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props) {
  return guarded("ncclCommQueryProperties", [&] {
    std::shared_ptr<Comm> c = comm_of(comm, "ncclCommQueryProperties");
    if (!c) return ncclInvalidArgument;
    if (!props) return fail(ncclInvalidArgument, "ncclCommQueryProperties: props is NULL");
    if (props->magic != NCCL_API_MAGIC || props->size < offsetof(ncclCommProperties_t, rank))
      return fail(ncclInvalidArgument,
                  "ncclCommQueryProperties: props is not initialized (magic 0x%x, size %zu)", props->magic,
                  props->size);
    ncclCommProperties_t full;
    memset(&full, 0, sizeof full);
    full.size = props->size;
    full.magic = props->magic;
    full.version = props->version;
    full.rank = c->rank;
    full.nRanks = c->nranks;
    full.cudaDev = c->device;
    full.nvmlDev = -1;
    full.nLsaTeams = c->session.hosts();
    full.commHash = c->session.hash;
    memcpy(props, &full, std::min(sizeof full, props->size));
    return ncclSuccess;
  });
}

}  // extern "C"
