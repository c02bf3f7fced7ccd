// What the CPU library adds to NCCL's C API: streams, events and devices, which CUDA provides for NVIDIA's
// library. Same rules as nccl_api.h, which comes first. A stream handle of 0, 1 or 2 is a
// communicator's default stream (CUDA's null, legacy and per-thread handles). A stream's flags: 1 is CUDA's
// cudaStreamNonBlocking; with 2 it has no thread, and a thread that waits for the stream runs its work.

// What ncclInvalidUsage alone does not tell.
typedef enum {
  pyncclCpuNoMismatch = 0,
  pyncclCpuCallsDiffer = 1, // the ranks called different things
  pyncclCpuRankLeft = 2, // a rank has left without a call that another waits in
} pyncclCpuErrorKind_t;

// Whether the connection to a rank has ended without a destroy on that rank.
typedef enum {
  pyncclCpuNotGone = 0,
  pyncclCpuFailed = 1, // it had reported an error
  pyncclCpuDied = 2, // it died, or aborted
} pyncclCpuGone_t;

// The purposes of an exchange.
typedef enum {
  pyncclCpuBeforeRegister = 1, // of a window
  pyncclCpuBeforeDeregister = 2,
  pyncclCpuOpenChannel = 3, // the control channel of a time-out
} pyncclCpuPurpose_t;

ncclResult_t pyncclCpuDeviceCount(int* count); // since 2.32.3
ncclResult_t pyncclCpuSetDevice(int device); // since 2.32.3
ncclResult_t pyncclCpuGetDevice(int* device); // since 2.32.3
// A number that is equal for processes which the library takes to be on one host: they share its devices.
ncclResult_t pyncclCpuHostId(uint64_t* host); // since 2.32.3
ncclResult_t pyncclCpuInterrupt(int thread, int on); // since 2.32.3
// This thread makes its calls for `thread`, which waits for them; `limited`: not longer than a time-out.
ncclResult_t pyncclCpuCallsFor(int thread, int limited); // since 2.32.3
// Limit the creations that this thread begins from now on; -1: only by PYNCCL_CPU_INIT_TIMEOUT, the maximum.
ncclResult_t pyncclCpuCreationTimeout(int64_t timeoutMs); // since 2.32.3
ncclResult_t pyncclCpuStreamCreate(cudaStream_t* stream); // since 2.32.3
ncclResult_t pyncclCpuStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags); // since 2.32.3
ncclResult_t pyncclCpuStreamDestroy(cudaStream_t stream); // since 2.32.3
ncclResult_t pyncclCpuStreamQuery(ncclComm_t comm, cudaStream_t stream); // since 2.32.3
ncclResult_t pyncclCpuStreamSynchronize(ncclComm_t comm, cudaStream_t stream, int64_t timeoutMs); // since 2.32.3
// Part of a wait without a time-out: ncclInProgress after `sliceMs`, if the thread goes on with the wait at once.
ncclResult_t pyncclCpuStreamAwait(ncclComm_t comm, cudaStream_t stream, int64_t sliceMs); // since 2.32.3
ncclResult_t pyncclCpuStreamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event); // since 2.32.3
ncclResult_t pyncclCpuEventCreate(cudaEvent_t* event); // since 2.32.3
ncclResult_t pyncclCpuEventDestroy(cudaEvent_t event); // since 2.32.3
// The event's result is then that of the communicator's work before it on the stream; success without one.
ncclResult_t pyncclCpuEventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream); // since 2.32.3
// No thread will wait for the event: the stream's thread starts with the work immediately.
ncclResult_t pyncclCpuEventQuery(cudaEvent_t event); // since 2.32.3
// When the event has happened, write the number 1 of 8 bytes to a descriptor, which must not block: an eventfd.
// The library keeps a duplicate; the newest descriptor replaces an earlier one.
ncclResult_t pyncclCpuEventNotify(cudaEvent_t event, int descriptor); // since 2.32.3
ncclResult_t pyncclCpuEventSynchronize(cudaEvent_t event, int64_t timeoutMs); // since 2.32.3

// The kind of the last error of a communicator, or of this thread if `comm` is NULL: a pyncclCpuErrorKind_t.
ncclResult_t pyncclCpuGetErrorKind(ncclComm_t comm, int* kind); // since 2.32.3
// How many bytes at the beginning of that error's text are the function that failed ("ncclSend: "), or the rank in
// the communicator ("rank 0 of 2: "); 0: the text begins otherwise.
ncclResult_t pyncclCpuGetErrorPrefix(ncclComm_t comm, int* functionBytes, int* placeBytes); // since 2.32.3
// Whether another rank has reported that error; behind what pyncclCpuGetErrorPrefix tells, the text then names the first
// that did ("rank 1 reports: ").
ncclResult_t pyncclCpuIsErrorReported(ncclComm_t comm, int* reported); // since 2.32.3
// The ranks that the last error of this thread is about, by index, if it is that of a creation: those for which a
// time-out has waited (16 at most), or the one that has died or left (ncclRemoteError). -1: there are no more.
ncclResult_t pyncclCpuGetLateRank(int index, int* rank); // since 2.32.3
// In place of ncclCommGrow, on a rank that exists and cannot call it: new ranks that join with the id that it passes or has
// made get this error, which is about these ranks (16 at most).
ncclResult_t pyncclCpuRefuseToGrow(ncclComm_t comm, const ncclUniqueId* uniqueId, ncclResult_t result, const char* why, const int* lateRanks, int lateRanksCount); // since 2.32.3
// Tells the other ranks that this one makes no further call on the communicator: those that wait for one get an error.
// Calls that were issued complete. It does not wait.
ncclResult_t pyncclCpuLeave(ncclComm_t comm); // since 2.32.3
// A pyncclCpuGone_t.
ncclResult_t pyncclCpuIsGone(ncclComm_t comm, int rank, int* gone); // since 2.32.3
// Whether a call of the communicator has waited for a call of that rank for more than 0.15 seconds, or if a call
// such as ncclCommSplit waits for that rank.
ncclResult_t pyncclCpuIsAwaited(ncclComm_t comm, int rank, int* awaited); // since 2.32.3
// The number in the parent of a rank of a communicator that was split or shrunk from it; -1: it has no such parent.
ncclResult_t pyncclCpuParentRank(ncclComm_t comm, int rank, int* parentRank); // since 2.32.3
// The algorithm of a collective ("ncclAllReduce") whose count is `size` bytes, and up to which size it is the same.
ncclResult_t pyncclCpuGetAlgorithm(ncclComm_t comm, const char* collective, size_t size, const char** algorithm, size_t* most); // since 2.32.3
// How many increments of a signal have come from a rank that no wait has taken yet.
ncclResult_t pyncclCpuSignalCount(ncclComm_t comm, int peer, int sigIdx, int ctx, uint64_t* count); // since 2.32.3
// An all_gather of `count` int64 numbers that matches only a call with the same `purpose`, a pyncclCpuPurpose_t.
ncclResult_t pyncclCpuExchange(const void* sendbuff, void* recvbuff, size_t count, int purpose, ncclComm_t comm, cudaStream_t stream); // since 2.32.3
// Wait until the puts and signals of all ranks have arrived that completed before; every rank must call it.
ncclResult_t pyncclCpuQuiet(ncclComm_t comm); // since 2.32.3
// Keep the memory of all ranks mapped that a window maps, beyond the end of the window and its communicator.
ncclResult_t pyncclCpuWindowHold(ncclWindow_t window, void** hold); // since 2.32.3
ncclResult_t pyncclCpuWindowRelease(void* hold); // since 2.32.3
