// The C API: collectives and point-to-point. Checks every argument, then submits the call.
#include <algorithm>
#include <optional>

#include "calls/group.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

ncclResult_t bad(const char* function, const char* what, long long value, const char* expected) {
  return fail_in(function, ncclInvalidArgument, "%s is %lld, expected %s", what, value, expected);
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes;
}

struct Extent {
  size_t send, recv;   // bytes of the buffers that this rank passes; 0: it needs none
  ptrdiff_t in_place;  // send - recv of an in-place call
  bool may_be_in_place;
};

Extent extent_of(const Op& op, const Comm& comm) {
  size_t b = op.bytes(), n = size_t(comm.nranks);
  ptrdiff_t mine = ptrdiff_t(size_t(comm.rank) * b);
  bool root = comm.rank == op.root;
  switch (op.func) {
    case Func::AllReduce:
      return {b, b, 0, true};
    case Func::Reduce:
      return {b, root ? b : 0, 0, true};
    case Func::Broadcast:
      return {root ? b : 0, b, 0, true};
    case Func::AllGather:
      return {b, b * n, mine, true};
    case Func::ReduceScatter:
      return {b * n, b, -mine, true};
    case Func::AlltoAll:
      return {b * n, b * n, 0, false};
    case Func::Gather:
      return {b, root ? b * n : 0, mine, true};
    case Func::Scatter:
      return {root ? b * n : 0, b, -mine, true};
    case Func::Send:
      return {b, 0, 0, false};
    default:
      return {0, b, 0, false};
  }
}

ncclResult_t check_buffers(const Op& op, const Comm& comm, const char* function) {
  if (op.count > SIZE_MAX / 16 / size_t(comm.nranks))
    return fail_in(function, ncclInvalidArgument, "count is %zu, which no memory can hold", op.count);
  Extent e = extent_of(op, comm);
  if (e.send && !op.send) return fail_in(function, ncclInvalidArgument, "sendbuff is NULL");
  if (e.recv && !op.recv) return fail_in(function, ncclInvalidArgument, "recvbuff is NULL");
  if (!overlap(op.send, e.send, op.recv, e.recv)) return ncclSuccess;
  auto distance = reinterpret_cast<intptr_t>(op.send) - reinterpret_cast<intptr_t>(op.recv);
  if (e.may_be_in_place && distance == e.in_place) return ncclSuccess;
  if (comm.nranks == 1 && distance == 0) return ncclSuccess;
  return fail_in(
      function, ncclInvalidArgument, "sendbuff %p (%zu bytes) and recvbuff %p (%zu bytes) overlap, %s",
      op.send, e.send, op.recv, e.recv,
      e.may_be_in_place ? "other than NCCL's rule for in place allows" : "and in place is not possible");
}

ncclResult_t check_red_op(Op& op, const Comm& comm, int red, const char* function) {
  if (red >= 0 && red < ncclNumOps) {
    static const RedKind kinds[] = {RedKind::Sum, RedKind::Prod, RedKind::Max, RedKind::Min, RedKind::Avg};
    op.red = kinds[red];
    return ncclSuccess;
  }
  RedOp made;
  if (!comm.registry.find_op(red, &made))
    return bad(function, "op", red, "an ncclRedOp_t below ncclNumOps or one that this communicator created");
  if (made.dtype != op.dtype && op.count > 0)
    return fail_in(function, ncclInvalidArgument, "op %d was created for %s, datatype is %s", red,
                   type_name(made.dtype), type_name(op.dtype));
  op.red = RedKind::PreMulSum;
  op.scalar = made.scalar;
  op.scalar_at = made.device_scalar;
  return ncclSuccess;
}

ncclResult_t check(Submission& call, int red, const char* function) {
  Op& op = call.op;
  Comm& comm = *call.comm;
  if (unsigned(op.dtype) >= ncclNumTypes)
    return bad(function, "datatype", op.dtype, "an ncclDataType_t below ncclNumTypes");
  bool names_rank = has_root(op.func) || is_p2p(op.func);
  if (names_rank && (op.root < 0 || op.root >= comm.nranks))
    return bad(function, is_p2p(op.func) ? "peer" : "root", op.root,
               ("0 to " + std::to_string(comm.nranks - 1)).c_str());
  if (reduces(op.func))
    if (ncclResult_t r = check_red_op(op, comm, red, function); r != ncclSuccess) return r;
  if (ncclResult_t r = check_buffers(op, comm, function); r != ncclSuccess) return r;
  return comm.check_accepts(function, op.func == Func::Recv);
}

// Checks everything but the communicator.
ncclResult_t check_all(Submission& call, int red, cudaStream_t stream, const char* function) {
  if (ncclResult_t r = check(call, red, function); r != ncclSuccess) return r;
  call.stream = stream_of(call.comm, stream, function);
  call.stream_handle = stream;
  if (!call.stream) return ncclInvalidArgument;
  return inject_fault(*call.comm, function);
}

ncclResult_t enter(const char* function, Func func, const void* send, void* recv, size_t count,
                   ncclDataType_t dtype, int red, int root, ncclComm_t handle, cudaStream_t stream) {
  return in_group(function, [&] {
    Submission call;
    call.op.func = func;
    call.op.send = send;
    call.op.recv = recv;
    call.op.count = count;
    call.op.dtype = dtype;
    call.op.root = root;
    if (ncclResult_t r = any_comm_of(handle, function, &call.comm); r != ncclSuccess) return r;
    if (ncclResult_t r = check_ready(*call.comm, function, func == Func::Recv); r != ncclSuccess) return r;
    if (call.comm->comm_state.revoked.load())
      return fail_in(function, ncclInvalidUsage, "comm has been revoked");
    if (ncclResult_t r = check_all(call, red, stream, function); r != ncclSuccess)
      return spoil_state(*call.comm, r);
    // As in NCCL empty collectives are discarded (src/enqueue.cc: taskAppend): no rank waits for them.
    if (count == 0 && !is_p2p(func)) return ncclSuccess;
    return submit(std::move(call));
  });
}

ncclResult_t check_coll_config(const ncclCollConfig_t* config, const char* function) {
  if (!config) return ncclSuccess;
  if (config->magic != NCCL_API_MAGIC)
    return fail_in(function, ncclInvalidArgument, "config is not initialized (magic 0x%x)", config->magic);
  if (config->size >= sizeof *config && config->launchCompletionEvent)
    return fail_in(function, ncclInvalidUsage, "the CPU library has no launchCompletionEvent");
  if (config->minCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs != NCCL_CONFIG_UNDEF_INT &&
      config->minCTAs > config->maxCTAs)
    return fail_in(function, ncclInvalidArgument, "config.minCTAs %d is greater than config.maxCTAs %d",
                   config->minCTAs, config->maxCTAs);
  return ncclSuccess;
}

std::optional<Func> collective_named(const std::string& function) {
  for (int i = 0; is_collective(Func(i)); ++i)
    if (function == std::string("nccl") + func_name(Func(i))) return Func(i);
  return std::nullopt;
}

}  // namespace
}  // namespace pncpu

using namespace pncpu;

#define CHECKED(function, config)                                                               \
  if (ncclResult_t r = in_group(function, [&] { return check_coll_config(config, function); }); \
      r != ncclSuccess)                                                                         \
  return r

extern "C" {

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclReduce", Func::Reduce, sendbuff, recvbuff, count, datatype, op, root, comm, stream);
}

ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return enter("ncclBcast", Func::Broadcast, buff, buff, count, datatype, 0, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclBroadcast", Func::Broadcast, sendbuff, recvbuff, count, datatype, 0, root, comm, stream);
}

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclAllReduce", Func::AllReduce, sendbuff, recvbuff, count, datatype, op, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return enter("ncclReduceScatter", Func::ReduceScatter, sendbuff, recvbuff, recvcount, datatype, op, 0, comm,
               stream);
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclAllGather", Func::AllGather, sendbuff, recvbuff, sendcount, datatype, 0, 0, comm, stream);
}

ncclResult_t pyncclCpuExchange(const void* sendbuff, void* recvbuff, size_t count, int purpose,
                               ncclComm_t comm, cudaStream_t stream) {
  const char* function = "pyncclCpuExchange";
  if (purpose < pyncclCpuBeforeRegister || purpose > kLastExchange)
    return in_group(function, [&] { return bad(function, "purpose", purpose, "1 to 3"); });
  return enter(function, Func::AllGather, sendbuff, recvbuff, count, ncclInt64, 0, purpose, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                          ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclAlltoAll", Func::AlltoAll, sendbuff, recvbuff, count, datatype, 0, 0, comm, stream);
}

ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclGather", Func::Gather, sendbuff, recvbuff, count, datatype, 0, root, comm, stream);
}

ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                         int root, ncclComm_t comm, cudaStream_t stream) {
  return enter("ncclScatter", Func::Scatter, sendbuff, recvbuff, count, datatype, 0, root, comm, stream);
}

ncclResult_t ncclAllReduceConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t* config) {
  CHECKED("ncclAllReduceConfig", config);
  return ncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream);
}

ncclResult_t ncclBroadcastConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                 int root, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t* config) {
  CHECKED("ncclBroadcastConfig", config);
  return ncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm, stream);
}

ncclResult_t ncclReduceConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                              ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                              const ncclCollConfig_t* config) {
  CHECKED("ncclReduceConfig", config);
  return ncclReduce(sendbuff, recvbuff, count, datatype, op, root, comm, stream);
}

ncclResult_t ncclAllGatherConfig(const void* sendbuff, void* recvbuff, size_t sendcount,
                                 ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t* config) {
  CHECKED("ncclAllGatherConfig", config);
  return ncclAllGather(sendbuff, recvbuff, sendcount, datatype, comm, stream);
}

ncclResult_t ncclReduceScatterConfig(const void* sendbuff, void* recvbuff, size_t recvcount,
                                     ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream, const ncclCollConfig_t* config) {
  CHECKED("ncclReduceScatterConfig", config);
  return ncclReduceScatter(sendbuff, recvbuff, recvcount, datatype, op, comm, stream);
}

ncclResult_t ncclAlltoAllConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  CHECKED("ncclAlltoAllConfig", config);
  return ncclAlltoAll(sendbuff, recvbuff, count, datatype, comm, stream);
}

ncclResult_t ncclGatherConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                              int root, ncclComm_t comm, cudaStream_t stream,
                              const ncclCollConfig_t* config) {
  CHECKED("ncclGatherConfig", config);
  return ncclGather(sendbuff, recvbuff, count, datatype, root, comm, stream);
}

ncclResult_t ncclScatterConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                               int root, ncclComm_t comm, cudaStream_t stream,
                               const ncclCollConfig_t* config) {
  CHECKED("ncclScatterConfig", config);
  return ncclScatter(sendbuff, recvbuff, count, datatype, root, comm, stream);
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return enter("ncclSend", Func::Send, sendbuff, nullptr, count, datatype, 0, peer, comm, stream);
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return enter("ncclRecv", Func::Recv, nullptr, recvbuff, count, datatype, 0, peer, comm, stream);
}

ncclResult_t pyncclCpuGetAlgorithm(ncclComm_t comm, const char* collective, size_t size,
                                   const char** algorithm, size_t* most) {
  const char* function = "pyncclCpuGetAlgorithm";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, function, &c); r != ncclSuccess) return r;
    REQUIRE_POINTER(function, collective);
    REQUIRE_POINTER(function, algorithm);
    REQUIRE_POINTER(function, most);
    std::optional<Func> func = collective_named(collective);
    if (!func)
      return fail_in(function, ncclInvalidArgument,
                     "collective is \"%s\", expected \"ncclAllReduce\" or another", collective);
    Choice choice = c->choice(*func, size);
    *algorithm = choice.algorithm;
    *most = choice.most;
    return ncclSuccess;
  });
}

}  // extern "C"
