// What the CPU library adds to NCCL's C API: streams, events and devices, which CUDA provides for NVIDIA's
// library. Same rules as nccl_api.h, which comes first. A stream handle of 0, 1 or 2 is a
// communicator's default stream (CUDA's null, legacy and per-thread handles). A stream's flags: 1 is CUDA's
// cudaStreamNonBlocking; with 2 it has no thread, and a thread that waits for the stream runs its work.

ncclResult_t pyncclCpuDeviceCount(int* count); // since 2.32.3
ncclResult_t pyncclCpuSetDevice(int device); // since 2.32.3
ncclResult_t pyncclCpuGetDevice(int* device); // since 2.32.3
ncclResult_t pyncclCpuInterrupt(int thread, int on); // since 2.32.3
ncclResult_t pyncclCpuStreamCreate(cudaStream_t* stream); // since 2.32.3
ncclResult_t pyncclCpuStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags); // since 2.32.3
ncclResult_t pyncclCpuStreamDestroy(cudaStream_t stream); // since 2.32.3
ncclResult_t pyncclCpuStreamQuery(ncclComm_t comm, cudaStream_t stream); // since 2.32.3
ncclResult_t pyncclCpuStreamSynchronize(ncclComm_t comm, cudaStream_t stream, int64_t timeoutMs); // since 2.32.3
ncclResult_t pyncclCpuStreamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event); // since 2.32.3
ncclResult_t pyncclCpuEventCreate(cudaEvent_t* event); // since 2.32.3
ncclResult_t pyncclCpuEventDestroy(cudaEvent_t event); // since 2.32.3
ncclResult_t pyncclCpuEventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream); // since 2.32.3
ncclResult_t pyncclCpuEventQuery(cudaEvent_t event); // since 2.32.3
ncclResult_t pyncclCpuEventSynchronize(cudaEvent_t event, int64_t timeoutMs); // since 2.32.3

// The kind of the last error of a communicator, or of this thread if `comm` is NULL: 1 if the ranks called
// different things, which ncclInvalidUsage alone does not tell; else 0.
ncclResult_t pyncclCpuGetErrorKind(ncclComm_t comm, int* kind); // since 2.32.3
// Whether the connection to a rank has ended without a destroy on that rank: it died, or aborted.
ncclResult_t pyncclCpuIsGone(ncclComm_t comm, int rank, int* gone); // since 2.32.3
