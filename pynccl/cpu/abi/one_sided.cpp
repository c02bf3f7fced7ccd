// The C API: windows, and the calls that put into them and wait for signals.
#include <sys/mman.h>

#include "base/allocations.hpp"
#include "calls/group.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

bool is_mapped(void* at) {
  unsigned char resident;
  auto page = reinterpret_cast<uintptr_t>(at) & ~uintptr_t(4095);
  return mincore(reinterpret_cast<void*>(page), 1, &resident) == 0 || errno != ENOMEM;
}

// NCCL's src/dev_runtime.cc: ncclCommWindowRegister, ncclDevrWindowRegisterInGroup. Unlike there the memory
// may come from anywhere.
ncclResult_t check_window(void* buff, size_t size, int flags, const char* function) {
  int known = NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING | NCCL_WIN_GIN_ONLY | NCCL_WIN_CFT_COUNTED;
  if (flags & ~known) return fail_in(function, ncclInvalidArgument, "winFlags is 0x%x", unsigned(flags));
  if (!buff || size == 0 || size > UINTPTR_MAX - reinterpret_cast<uintptr_t>(buff))
    return fail_in(function, ncclInvalidArgument, "buff is %p and size %zu, expected memory", buff, size);
  switch (per_process<Allocations>().hold(buff, size)) {
    case Allocations::Holds::Nothing:
      if (is_mapped(buff) && is_mapped(static_cast<char*>(buff) + size - 1)) return ncclSuccess;
      return fail_in(function, ncclUnhandledCudaError, "%zu bytes at %p are not memory of this process", size,
                     buff);
    case Allocations::Holds::Part:
      return fail_in(function, ncclUnhandledCudaError,
                     "%zu bytes at %p reach beyond the memory of ncclMemAlloc", size, buff);
    case Allocations::Holds::All:
      break;
  }
  if (reinterpret_cast<uintptr_t>(buff) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    return fail_in(function, ncclInvalidArgument,
                   "buff is %p, expected a multiple of %d bytes in memory of ncclMemAlloc", buff,
                   NCCL_WIN_REQUIRED_ALIGNMENT);
  return ncclSuccess;
}

// A rank that fails to come would make the others wait in later calls, so the communicator fails on all
// ranks. A peer may put as soon as it returns, so no rank returns before all have the window.
ncclResult_t register_window(Comm& comm, const Meeting (&meetings)[2], std::shared_ptr<Window> window,
                             ncclWindow_t* win) {
  std::vector<std::string> all;
  ncclResult_t r = meetings[0].meet(window->describe(), &all);
  if (r == ncclSuccess && (r = window->attach(comm.session, all)) != ncclSuccess) return r;
  void* handle = r == ncclSuccess ? comm.registry.add_window(window) : nullptr;
  if (r == ncclSuccess) r = meetings[1].meet(window->reach(), &all);
  if (r == ncclTimeout) comm.fail_with(r, last_error());
  if (r != ncclSuccess && handle) comm.registry.remove_window(handle, "ncclCommWindowRegister");
  if (r != ncclSuccess) return r;
  window->learn_reach(all);
  comm.registry.share_window(std::move(window));
  *win = static_cast<ncclWindow_t>(handle);
  return ncclSuccess;
}

ncclResult_t submit_window(ncclComm_t handle, void* buff, size_t size, ncclWindow_t* win, int flags) {
  const char* function = "ncclCommWindowRegister";
  std::shared_ptr<Comm> comm;
  if (ncclResult_t r = comm_of(handle, function, &comm); r != ncclSuccess) return r;
  REQUIRE_POINTER(function, win);
  *win = nullptr;
  if (ncclResult_t r = check_window(buff, size, flags, function); r != ncclSuccess) return r;
  auto window = std::make_shared<Window>(comm->serial, comm->registry.next_window(), buff, size, flags);
  struct Two {
    Meeting of[2];
  } two{{{comm, Meeting::everyone(*comm), function}, {comm, Meeting::everyone(*comm), function}}};
  Job job{function, {}, comm, {}, comm->blocking};
  job.run = [=] { return register_window(*comm, two.of, window, win); };
  ncclResult_t r = submit(std::move(job));
  return r == ncclInProgress ? ncclSuccess : r;
}

ncclResult_t bad(const char* function, const char* what, long long value, long long most) {
  return fail_in(function, ncclInvalidArgument, "%s is %lld, expected 0 to %lld", what, value, most);
}

// The number of a signal among all of a pair of ranks.
ncclResult_t check_signal(const Comm& comm, int peer, int signal, int context, const char* function,
                          uint32_t* number) {
  const Session& session = comm.session;
  if (session.contexts == 0)
    return fail_in(function, ncclInvalidUsage, "config.numRmaCtx is 0: the communicator has no signals");
  if (peer < 0 || peer >= comm.nranks) return bad(function, "peer", peer, comm.nranks - 1);
  if (context < 0 || context >= session.contexts) return bad(function, "ctx", context, session.contexts - 1);
  if (signal < 0 || signal >= session.signals) return bad(function, "sigIdx", signal, session.signals - 1);
  *number = uint32_t(context * session.signals + signal);
  return ncclSuccess;
}

ncclResult_t aim(const Comm& comm, const Op& op, ncclWindow_t win, size_t offset, const char* function,
                 OneSidedCall* call) {
  if (unsigned(op.dtype) >= ncclNumTypes) return bad(function, "datatype", op.dtype, ncclNumTypes - 1);
  std::shared_ptr<Window> window = comm.registry.find_window(win, function);
  if (!window) return ncclInvalidArgument;
  size_t size = window->size_of(op.root);
  if (op.count > size / type_size(op.dtype) || offset > size - op.bytes())
    return fail_in(function, ncclInvalidArgument,
                   "count is %zu (%s) and peerWinOffset %zu; the window of rank %d has %zu bytes", op.count,
                   type_name(op.dtype), offset, op.root, size);
  if (op.count && !op.send) return fail_in(function, ncclInvalidArgument, "localbuff is NULL");
  char* mapped = window->mapped(op.root);
  call->target = {window->number, offset, window->address_of(op.root) + offset,
                  mapped ? mapped + offset : nullptr};
  call->keeps = std::move(window);
  return ncclSuccess;
}

// Submits a one-sided call; `complete` fills in the operation for its communicator.
template <class Complete>
ncclResult_t enter(const char* function, Func func, ncclComm_t handle, cudaStream_t stream,
                   Complete complete) {
  return in_group(function, [&]() -> ncclResult_t {
    Submission call;
    call.op.func = func;
    call.op.one_sided = std::make_shared<OneSidedCall>();
    if (ncclResult_t r = any_comm_of(handle, function, &call.comm); r != ncclSuccess) return r;
    if (ncclResult_t r = check_ready(*call.comm, function); r != ncclSuccess) return r;
    ncclResult_t r = call.comm->check_accepts(function, false);
    if (r == ncclSuccess) r = complete(*call.comm, call.op);
    if (r == ncclSuccess && !(call.stream = stream_of(call.comm, stream, function))) r = ncclInvalidArgument;
    if (r == ncclSuccess) r = inject_fault(*call.comm, function);
    if (r != ncclSuccess) return spoil_state(*call.comm, r);
    call.stream_handle = stream;
    return submit(std::move(call));
  });
}

ncclResult_t check_flags(unsigned int flags, const char* function) {
  return flags == 0 ? ncclSuccess
                    : fail_in(function, ncclInvalidArgument, "flags is 0x%x, expected 0", flags);
}

// The pointer to a member's part of a window, where this process can load and store. The members are `count`
// ranks from `first` on; both follow from the window.
template <class Members>
ncclResult_t pointer_to(const char* function, ncclWindow_t win, size_t offset, const char* what, int member,
                        void** out, Members members) {
  return guarded(function, [&]() -> ncclResult_t {
    REQUIRE_POINTER(function, out);
    *out = nullptr;
    std::shared_ptr<Window> window = find_handle<Window>(win, function);
    if (!window) return ncclInvalidArgument;
    const auto [first, count] = members(*window);
    if (member < 0 || member >= count) return bad(function, what, member, count - 1);
    const int rank = first + member;
    if (offset >= window->size_of(rank))
      return fail_in(function, ncclInvalidArgument, "offset is %zu; the window of rank %d has %zu bytes",
                     offset, rank, window->size_of(rank));
    if (int error = window->shortage(rank))
      return fail_in(function, ncclSystemError,
                     "rank %d could not map the memory of rank %d to register the window: %s", window->rank(),
                     rank, strerror(error));
    // As in NCCL a peer that cannot be reached has no pointer, and that is no error.
    *out = window->mapped(rank) ? window->mapped(rank) + offset : nullptr;
    return ncclSuccess;
  });
}

}  // namespace
}  // namespace pncpu

using namespace pncpu;

extern "C" {

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int winFlags) {
  return in_group("ncclCommWindowRegister", [&] { return submit_window(comm, buff, size, win, winFlags); });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  const char* function = "ncclCommWindowDeregister";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, function, &c); r != ncclSuccess) return r;
    return win ? c->registry.remove_window(win, function) : ncclSuccess;
  });
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr) {
  const char* function = "ncclWinGetUserPtr";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, function, &c); r != ncclSuccess) return r;
    REQUIRE_POINTER(function, outUserPtr);
    std::shared_ptr<Window> window = c->registry.find_window(win, function);
    if (!window) return ncclInvalidArgument;
    *outUserPtr = window->buffer;
    return ncclSuccess;
  });
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** outPtr) {
  return pointer_to("ncclGetPeerDevicePointer", window, offset, "peer", peer, outPtr,
                    [](const Window& w) { return std::pair(0, w.ranks()); });
}

ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank, void** outPtr) {
  return pointer_to("ncclGetLsaDevicePointer", window, offset, "lsaRank", lsaRank, outPtr,
                    [](const Window& w) { return std::pair(w.first_lsa(), w.lsa_size()); });
}

ncclResult_t pyncclCpuWindowHold(ncclWindow_t window, void** hold) {
  const char* function = "pyncclCpuWindowHold";
  return guarded(function, [&]() -> ncclResult_t {
    REQUIRE_POINTER(function, hold);
    std::shared_ptr<Window> found = find_handle<Window>(window, function);
    if (!found) return ncclInvalidArgument;
    *hold = handles<Hold>().add(std::make_shared<Hold>(Hold{std::move(found)}));
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuWindowRelease(void* hold) {
  const char* function = "pyncclCpuWindowRelease";
  return guarded(function, [&] {
    return handles<Hold>().take(hold) ? ncclSuccess : refuse_handle<Hold>(hold, function);
  });
}

// What a rank tells its peers in the meeting follows its puts on the same connections.
ncclResult_t pyncclCpuQuiet(ncclComm_t comm) {
  const char* function = "pyncclCpuQuiet";
  return in_group(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, function, &c); r != ncclSuccess) return r;
    Meeting meeting(c, Meeting::everyone(*c), function);
    auto meet = [meeting] {
      std::vector<std::string> all;
      return meeting.meet("", &all);
    };
    return submit(Job{function, meet, c, {}, c->blocking});
  });
}

ncclResult_t pyncclCpuSignalCount(ncclComm_t comm, int peer, int sigIdx, int ctx, uint64_t* count) {
  const char* function = "pyncclCpuSignalCount";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    uint32_t signal;
    ncclResult_t r = any_comm_of(comm, function, &c);
    if (r == ncclSuccess) r = check_ready(*c, function);
    if (r == ncclSuccess) r = check_signal(*c, peer, sigIdx, ctx, function, &signal);
    if (r != ncclSuccess) return r;
    REQUIRE_POINTER(function, count);
    *count = c->signals_pending(peer, signal);
    return ncclSuccess;
  });
}

ncclResult_t ncclPutSignal(const void* localbuff, size_t count, ncclDataType_t datatype, int peer,
                           ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  const char* function = "ncclPutSignal";
  return enter(function, Func::PutSignal, comm, stream, [&](Comm& c, Op& op) {
    op.send = localbuff, op.count = count, op.dtype = datatype, op.root = peer;
    ncclResult_t r = check_signal(c, peer, sigIdx, ctx, function, &op.one_sided->signal);
    if (r == ncclSuccess) r = check_flags(flags, function);
    return r == ncclSuccess ? aim(c, op, peerWin, peerWinOffset, function, op.one_sided.get()) : r;
  });
}

ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream) {
  const char* function = "ncclSignal";
  return enter(function, Func::Signal, comm, stream, [&](Comm& c, Op& op) {
    op.root = peer;
    ncclResult_t r = check_signal(c, peer, sigIdx, ctx, function, &op.one_sided->signal);
    return r == ncclSuccess ? check_flags(flags, function) : r;
  });
}

ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm,
                            cudaStream_t stream) {
  const char* function = "ncclWaitSignal";
  return enter(function, Func::WaitSignal, comm, stream, [&](Comm& c, Op& op) {
    if (!signalDescs || nDesc <= 0)
      return fail_in(function, ncclInvalidArgument, "signalDescs is %p and nDesc %d, expected at least one",
                     static_cast<void*>(signalDescs), nDesc);
    for (int i = 0; i < nDesc; ++i) {
      const ncclWaitSignalDesc_t& d = signalDescs[i];
      Awaited wait{d.peer, 0, uint64_t(d.opCnt), 0};
      if (d.opCnt <= 0)
        return fail_in(function, ncclInvalidArgument, "opCnt of descriptor %d is %d, expected 1 or more", i,
                       d.opCnt);
      if (ncclResult_t r = check_signal(c, d.peer, d.sigIdx, d.ctx, function, &wait.signal); r != ncclSuccess)
        return r;
      op.one_sided->waits.push_back(wait);
    }
    return ncclSuccess;
  });
}

}  // extern "C"
