// What pynccl calls in the CUDA driver (libcuda.so.1): devices, primary contexts, streams, events, graphs,
// memory and pointer attributes. Same rules as nccl_api.h, which comes first; "since" is the driver's CUDA
// version; 11.0 stands for every version up to the oldest that pynccl supports.

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphExec_st* CUgraphExec;
typedef struct { unsigned char bytes[16]; } CUuuid;

// The values that pynccl uses.
typedef enum {
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
} cudaError_enum;
typedef enum {
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
} CUstreamCaptureMode;
typedef enum {
  CU_STREAM_NON_BLOCKING = 1,
} CUstream_flags;
typedef enum {
  CU_EVENT_DISABLE_TIMING = 2,
} CUevent_flags;
typedef enum {
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
} CUpointer_attribute;
typedef enum {
  CU_MEMORYTYPE_HOST = 1,
} CUmemorytype;
typedef enum {
  CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1,
  CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3,
} CUdevice_P2PAttribute;

CUresult cuInit(unsigned int flags); // since 11.0
CUresult cuDriverGetVersion(int* version); // since 11.0
CUresult cuGetErrorName(CUresult error, const char** name); // since 11.0
CUresult cuGetErrorString(CUresult error, const char** text); // since 11.0

CUresult cuDeviceGetCount(int* count); // since 11.0
CUresult cuDeviceGet(CUdevice* device, int ordinal); // since 11.0
CUresult cuDeviceGetName(char* name, int len, CUdevice device); // since 11.0
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device); // since 11.0
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device); // since 11.4
CUresult cuDeviceGetPCIBusId(char* id, int len, CUdevice device); // since 11.0
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer); // since 11.0
CUresult cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice device, CUdevice peer); // since 11.0
CUresult cuDevicePrimaryCtxRetain(CUcontext* ctx, CUdevice device); // since 11.0

CUresult cuCtxGetCurrent(CUcontext* ctx); // since 11.0
CUresult cuCtxSetCurrent(CUcontext ctx); // since 11.0
CUresult cuCtxGetDevice(CUdevice* device); // since 11.0
CUresult cuCtxPushCurrent_v2(CUcontext ctx); // since 11.0
CUresult cuCtxPopCurrent_v2(CUcontext* ctx); // since 11.0
CUresult cuCtxSynchronize(void); // since 11.0

CUresult cuStreamCreate(CUstream* stream, unsigned int flags); // since 11.0
CUresult cuStreamDestroy_v2(CUstream stream); // since 11.0
CUresult cuStreamQuery(CUstream stream); // since 11.0
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags); // since 11.0
CUresult cuStreamIsCapturing(CUstream stream, int* status); // since 11.0
CUresult cuThreadExchangeStreamCaptureMode(int* mode); // since 11.0
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode); // since 11.0
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph); // since 11.0

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags); // since 11.4
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream); // since 11.0
CUresult cuGraphExecDestroy(CUgraphExec exec); // since 11.0
CUresult cuGraphDestroy(CUgraph graph); // since 11.0

CUresult cuEventCreate(CUevent* event, unsigned int flags); // since 11.0
CUresult cuEventDestroy_v2(CUevent event); // since 11.0
CUresult cuEventRecord(CUevent event, CUstream stream); // since 11.0
CUresult cuEventQuery(CUevent event); // since 11.0

CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr ptr); // since 11.0
CUresult cuMemGetInfo_v2(size_t* free, size_t* total); // since 11.0
CUresult cuMemAlloc_v2(CUdeviceptr* ptr, size_t bytes); // since 11.0
CUresult cuMemFree_v2(CUdeviceptr ptr); // since 11.0
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes); // since 11.0
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes); // since 11.0
