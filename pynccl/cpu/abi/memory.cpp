// The C API: memory, registrations, windows, reduction operators, suspension, and what can be asked of a
// communicator.
#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

constexpr size_t kPage = 4096;

struct Allocations {
  std::mutex mutex;
  std::map<void*, size_t> sizes;
};
Allocations& allocations() {
  static auto* a = new Allocations;
  return *a;
}

ncclResult_t add_registration(ncclComm_t comm, const char* function, void* buffer, size_t size, int flags,
                              bool window, void** out) {
  Comm* c = comm_of(comm, function);
  if (!c) return ncclInvalidArgument;
  if (!out) return fail(ncclInvalidArgument, "%s: %s is NULL", function, window ? "win" : "handle");
  *out = nullptr;
  if (!buffer || size == 0)
    return fail(ncclInvalidArgument, "%s: buff is %p and size %zu, expected memory", function, buffer, size);
  // A byte of its own is an address that nothing else has: the handle.
  void* handle = new char;
  std::lock_guard<std::mutex> lock(c->mutex);
  c->registrations[handle] = {buffer, size, flags, window};
  *out = handle;
  return ncclSuccess;
}

ncclResult_t remove_registration(ncclComm_t comm, const char* function, void* handle, bool window) {
  Comm* c = comm_of(comm, function);
  if (!c) return ncclInvalidArgument;
  std::lock_guard<std::mutex> lock(c->mutex);
  auto it = c->registrations.find(handle);
  if (it == c->registrations.end())
    return fail(ncclInvalidArgument, "%s: %p is not a %s of this communicator, or was deregistered before",
                function, handle, window ? "window" : "registration");
  if (it->second.window != window)
    return fail(ncclInvalidArgument, "%s: %p was made by %s", function, handle,
                window ? "ncclCommRegister" : "ncclCommWindowRegister");
  c->registrations.erase(it);  // the handle itself is never reused
  return ncclSuccess;
}

// All ranks come to a halt together: nothing may be underway when the rings' memory goes.
ncclResult_t suspend(Comm& comm) {
  std::vector<int> ranks;
  for (int q = 0; q < comm.nranks; ++q) ranks.push_back(q);
  std::vector<std::string> all;
  auto meet = [&](const std::string& word) {
    uint64_t tag = uint64_t(4) << 32 | ++comm.derived;
    return derive(comm, ranks, tag, word, "ncclCommSuspend", &all);
  };
  comm.drain(kForever);
  if (ncclResult_t r = meet(""); r != ncclSuccess) return r;
  char busy = 0;
  for (int q = 0; q < comm.nranks; ++q)
    if (q != comm.rank && comm.peer(q).local >= 0)
      for (Pipe& pipe : comm.peer(q).pipe) busy = busy || !pipe.idle();
  if (ncclResult_t r = meet(std::string(1, busy)); r != ncclSuccess) return r;
  for (int q = 0; q < comm.nranks; ++q)
    if (all[size_t(q)] != std::string(1, '\0'))
      return fail(ncclInvalidUsage, "ncclCommSuspend: rank %d has messages that were not received", q);
  if (comm.segment() && comm.session.local_index() == 0) comm.segment()->release_rings();
  if (ncclResult_t r = meet(""); r != ncclSuccess) return r;
  comm.phase.store(Phase::Suspended);
  comm.set_pending(ncclSuccess);
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
  }
  return "unknown result code";
}

void ncclResetDebugInit(void) { reset_debug(); }

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  if (!ptr) return fail(ncclInvalidArgument, "ncclMemAlloc: ptr is NULL");
  *ptr = nullptr;
  if (size == 0 || size > SIZE_MAX / 2) return fail(ncclInvalidArgument, "ncclMemAlloc: size is %zu", size);
  size_t bytes = align_up(size, kPage);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return fail(ncclSystemError, "ncclMemAlloc: %zu bytes: %s", size, strerror(errno));
  std::lock_guard<std::mutex> lock(allocations().mutex);
  allocations().sizes[at] = bytes;
  *ptr = at;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* ptr) {
  if (!ptr) return ncclSuccess;
  std::lock_guard<std::mutex> lock(allocations().mutex);
  auto it = allocations().sizes.find(ptr);
  if (it == allocations().sizes.end())
    return fail(ncclInvalidArgument, "ncclMemFree: %p was not returned by ncclMemAlloc, or was freed before",
                ptr);
  munmap(ptr, it->second);
  allocations().sizes.erase(it);
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  return add_registration(comm, "ncclCommRegister", buff, size, 0, false, handle);
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return remove_registration(comm, "ncclCommDeregister", handle, false);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags) {
  int known = NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING | NCCL_WIN_GIN_ONLY | NCCL_WIN_CFT_COUNTED;
  if (winFlags & ~known)
    return fail(ncclInvalidArgument, "ncclCommWindowRegister: winFlags is 0x%x", unsigned(winFlags));
  if (reinterpret_cast<uintptr_t>(buff) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    return fail(ncclInvalidArgument, "ncclCommWindowRegister: buff is %p, expected a multiple of %d bytes",
                buff, NCCL_WIN_REQUIRED_ALIGNMENT);
  return add_registration(comm, "ncclCommWindowRegister", buff, size, winFlags, true,
                          reinterpret_cast<void**>(win));
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  return remove_registration(comm, "ncclCommWindowDeregister", win, true);
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr) {
  Comm* c = comm_of(comm, "ncclWinGetUserPtr");
  if (!c) return ncclInvalidArgument;
  if (!outUserPtr) return fail(ncclInvalidArgument, "ncclWinGetUserPtr: outUserPtr is NULL");
  std::lock_guard<std::mutex> lock(c->mutex);
  auto it = c->registrations.find(win);
  if (it == c->registrations.end() || !it->second.window)
    return fail(ncclInvalidArgument, "ncclWinGetUserPtr: %p is not a window of this communicator",
                static_cast<void*>(win));
  *outUserPtr = it->second.buffer;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  Comm* c = comm_of(comm, "ncclRedOpCreatePreMulSum");
  if (!c) return ncclInvalidArgument;
  if (!op) return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: op is NULL");
  if (!scalar) return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: scalar is NULL");
  if (unsigned(datatype) >= ncclNumTypes)
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: datatype is %d", int(datatype));
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: residence is %d", int(residence));
  RedOp made{datatype, {}, residence == ncclScalarDevice ? scalar : nullptr};
  if (residence == ncclScalarHostImmediate) memcpy(made.scalar.bytes, scalar, type_size(datatype));
  std::lock_guard<std::mutex> lock(c->mutex);
  *op = ncclRedOp_t(c->next_red_op++);
  c->red_ops[int(*op)] = made;
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  Comm* c = comm_of(comm, "ncclRedOpDestroy");
  if (!c) return ncclInvalidArgument;
  std::lock_guard<std::mutex> lock(c->mutex);
  if (!c->red_ops.erase(int(op)))
    return fail(ncclInvalidArgument,
                "ncclRedOpDestroy: op %d was not created by this communicator, or was destroyed", int(op));
  return ncclSuccess;
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  Comm* c = comm_of(comm, "ncclCommSuspend");
  if (!c) return spoil(ncclInvalidArgument);
  if (flags != NCCL_SUSPEND_MEM)
    return spoil(fail(ncclInvalidArgument, "ncclCommSuspend: flags is 0x%x, expected NCCL_SUSPEND_MEM",
                      unsigned(flags)));
  if (c->error() != ncclSuccess)
    return spoil(fail(c->error(), "ncclCommSuspend: comm has failed: %s", c->error_text().c_str()));
  if (c->phase.load() != Phase::Ready)
    return spoil(fail(ncclInvalidUsage, "ncclCommSuspend: comm is suspended or finalized already"));
  Job job;
  job.comm = c->shared_from_this();
  job.blocking = c->blocking;
  job.run = [keep = job.comm] { return suspend(*keep); };
  return submit(std::move(job));
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  Comm* c = comm_of(comm, "ncclCommResume");
  if (!c) return spoil(ncclInvalidArgument);
  Phase suspended = Phase::Suspended;
  if (!c->phase.compare_exchange_strong(suspended, Phase::Ready))
    return spoil(fail(ncclInvalidUsage, "ncclCommResume: comm is not suspended"));
  return ncclSuccess;
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  Comm* c = comm_of(comm, "ncclCommMemStats");
  if (!c) return ncclInvalidArgument;
  if (!value) return fail(ncclInvalidArgument, "ncclCommMemStats: value is NULL");
  uint64_t rings = 0, rest = sizeof(Comm);
  if (Segment* s = c->segment()) {
    rings =
        uint64_t(c->session.local_ranks()) * uint64_t(c->session.local_ranks()) * kChannels * s->ring_bytes();
    rest += s->bytes() - rings;
  }
  switch (stat) {
    case ncclStatGpuMemSuspend:
      return *value = rings, ncclSuccess;
    case ncclStatGpuMemSuspended:
      return *value = c->phase.load() == Phase::Suspended, ncclSuccess;
    case ncclStatGpuMemPersist:
      return *value = rest, ncclSuccess;
    case ncclStatGpuMemTotal:
      return *value = rings + rest, ncclSuccess;
  }
  return fail(ncclInvalidArgument, "ncclCommMemStats: stat is %d", int(stat));
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props) {
  Comm* c = comm_of(comm, "ncclCommQueryProperties");
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
}

}  // extern "C"
