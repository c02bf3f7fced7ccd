// NCCL's C API, declared once: nccl.h 2.32.3, and of nccl_device.h ncclCommQueryProperties and the teams.
//
// One function a line, ending in the NCCL version that brought it; a struct with a version inside says
// the same of each field, and `= VALUE` where its initializer sets more than "undefined". Read by
// _build_ffi.py (the cffi declarations, the function table, pynccl.capi and the nccl.h for C programs) and
// included by the CPU library, so it holds no preprocessor conditionals.

#define NCCL_MAJOR 2
#define NCCL_MINOR 32
#define NCCL_PATCH 3
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 23203
#define NCCL_VERSION(X,Y,Z) (((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))

typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;
typedef struct ncclParamHandle* ncclParamHandle_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#define NCCL_COMM_NULL NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[128]; } ncclUniqueId;

#define NCCL_API_MAGIC 0xcafebeef
#define NCCL_SIM_INFO_MAGIC 0x74685283
#define NCCL_CONFIG_UNDEF_INT (-2147483647 - 1)
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT (-1.0f)
#define NCCL_SPLIT_NOCOLOR (-1)

#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_GIN_ONLY 0x04
#define NCCL_WIN_CFT_COUNTED 0x08
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
  ncclNumResults = 9
} ncclResult_t;

typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

typedef enum {
  ncclHostCftDefault = -2147483648,
  ncclHostCftEnable = 1,
  ncclHostCftDisable = 2,
  ncclHostCftFallback = 3
} ncclHostCftMode_t;

typedef enum {
  ncclNvlsHostModeDefault = -2147483648,
  ncclNvlsHostModeEnable = 0,
  ncclNvlsHostModeDisableTransport = 1,
  ncclNvlsHostModeDisableSymmetricMultimem = 2,
  ncclNvlsHostModeDisable = 2147483647
} ncclNvlsHostMode_t;

typedef enum { NCCL_ENCRYPTION_MODE_NONE = 0, NCCL_ENCRYPTION_MODE_PSK = 1 } ncclEncryptionMode_t;

typedef struct {
  size_t size;                 // since 2.14.3
  unsigned int magic;          // since 2.14.3
  unsigned int version;        // since 2.14.3
  int blocking;                // since 2.14.3
  int cgaClusterSize;          // since 2.17.1
  int minCTAs;                 // since 2.17.1
  int maxCTAs;                 // since 2.17.1
  const char* netName;         // since 2.17.1
  int splitShare;              // since 2.18.1
  int trafficClass;            // since 2.26.2
  const char* commName;        // since 2.27.3
  int collnetEnable;           // since 2.27.3
  int CTAPolicy;               // since 2.27.3
  int shrinkShare;             // since 2.27.3
  int nvlsCTAs;                // since 2.27.3
  int nChannelsPerNetPeer;     // since 2.28.3
  int nvlinkCentricSched;      // since 2.28.3
  int graphUsageMode;          // since 2.29.2
  int numRmaCtx;               // since 2.29.2
  int maxP2pPeers;             // since 2.30.3
  int graphStreamOrdering;     // since 2.30.7
  int launchOrderImplicit;     // since 2.31.2
  int numRmaSig;               // since 2.31.2
  int rmaEagerInit;            // since 2.31.2
  int hostCftMode;             // since 2.31.2
  int nvlsHostMode;            // since 2.32.3
} ncclConfig_t;

typedef struct ncclConfigExt {
  struct ncclConfigExt* next;
  struct { int vendorId; int optionId; } key;
  union { int i; const char* s; void* raw; } val;
} ncclConfigExt_t;

typedef struct {
  size_t size;                        // since 2.31.2
  unsigned int magic;                 // since 2.31.2
  unsigned int version;               // since 2.31.2
  ncclConfigExt_t* ext;               // since 2.31.2
  int minCTAs;                        // since 2.31.2
  int maxCTAs;                        // since 2.31.2
  int nvlsCTAs;                       // since 2.31.2
  int cgaClusterSize;                 // since 2.31.2
  const char* algSelection;           // since 2.31.2
  int forceAlgSelection;              // since 2.31.2 = 1
  int CTAPolicy;                      // since 2.31.2
  uint64_t userProfilerTag;           // since 2.31.2 = 0
  cudaEvent_t launchCompletionEvent;  // since 2.32.3
} ncclCollConfig_t;

typedef struct {
  size_t size;            // since 2.22.3
  unsigned int magic;     // since 2.22.3 = NCCL_SIM_INFO_MAGIC
  unsigned int version;   // since 2.22.3
  float estimatedTime;    // since 2.22.3 = NCCL_UNDEF_FLOAT
} ncclSimInfo_t;

typedef struct {
  size_t size;            // since 2.32.3
  unsigned int magic;     // since 2.32.3
  unsigned int version;   // since 2.32.3
  int mode;               // since 2.32.3 = NCCL_ENCRYPTION_MODE_NONE
  const char* psk;        // since 2.32.3
} ncclEncryptionConfig_t;

typedef struct {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;

ncclResult_t ncclMemAlloc(void** ptr, size_t size); // since 2.19.1
ncclResult_t ncclMemFree(void* ptr); // since 2.19.1
ncclResult_t ncclGetVersion(int* version); // since 2.3.5
ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId); // since 1.2.1
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config); // since 2.14.3
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank); // since 1.2.1
ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist); // since 1.2.1
ncclResult_t ncclCommFinalize(ncclComm_t comm); // since 2.14.3
ncclResult_t ncclCommDestroy(ncclComm_t comm); // since 1.2.1
ncclResult_t ncclCommAbort(ncclComm_t comm); // since 2.4.2
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags); // since 2.28.7
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config); // since 2.18.1
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags); // since 2.27.3
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId); // since 2.29.2
ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank, ncclComm_t* newcomm, ncclConfig_t* config); // since 2.29.2
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds, ncclConfig_t* config); // since 2.23.4
const char* ncclGetErrorString(ncclResult_t result); // since 1.2.1
const char* ncclGetLastError(ncclComm_t comm); // since 2.13.4
void ncclResetDebugInit(void); // since 2.24.3
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError); // since 2.4.2
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count); // since 1.2.1
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device); // since 1.2.1
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank); // since 1.2.1
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle); // since 2.19.1
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle); // since 2.19.1
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags); // since 2.29.7
ncclResult_t ncclCommResume(ncclComm_t comm); // since 2.29.7
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value); // since 2.29.7
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags); // since 2.27.3
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win); // since 2.27.3
ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr); // since 2.29.2
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm); // since 2.11.4
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm); // since 2.11.4
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream); // since 1.2.1
ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream); // since 1.2.1
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream); // since 2.3.5
ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream); // since 1.2.1
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream); // since 1.2.1
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream); // since 1.2.1
ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream); // since 2.28.3
ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream); // since 2.28.3
ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream); // since 2.28.3
ncclResult_t ncclAllReduceConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclBroadcastConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclReduceConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclAllGatherConfig(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclReduceScatterConfig(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclAlltoAllConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclGatherConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclScatterConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config); // since 2.31.2
ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream); // since 2.7.3
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream); // since 2.7.3
ncclResult_t ncclPutSignal(const void* localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream); // since 2.29.2
ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream); // since 2.29.2
ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm, cudaStream_t stream); // since 2.29.2
ncclResult_t ncclGroupStart(void); // since 2.3.5
ncclResult_t ncclGroupEnd(void); // since 2.3.5
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo); // since 2.22.3
ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t* config); // since 2.32.3
ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key); // since 2.30.4
ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t* out); // since 2.30.4
ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t* out); // since 2.30.4
ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t* out); // since 2.30.4
ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t* out); // since 2.30.4
ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t* out); // since 2.30.4
ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t* out); // since 2.30.4
ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t* out); // since 2.30.4
ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t* out); // since 2.30.4
ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char** out); // since 2.30.4
ncclResult_t ncclParamGet(ncclParamHandle_t h, void* out, int maxLen, int* len); // since 2.30.4
ncclResult_t ncclParamGetParameter(const char* key, const char** value, int* valueLen); // since 2.30.4
ncclResult_t ncclParamGetAllParameterKeys(const char*** table, int* tableLen); // since 2.30.4
void ncclParamDumpAll(void); // since 2.30.4

// From here on: what nccl_device.h declares for the host.

typedef enum {
  NCCL_GIN_CONNECTION_NONE = 0,
  NCCL_GIN_CONNECTION_FULL = 1,
  NCCL_GIN_CONNECTION_RAIL = 2,
  NCCL_GIN_CONNECTION_CUSTOM_STRIDE = 3
} ncclGinConnectionType_t;

typedef enum {
  NCCL_GIN_TYPE_NONE = 0,
  NCCL_GIN_TYPE_PROXY = 2,
  NCCL_GIN_TYPE_GDAKI = 3,
  NCCL_GIN_TYPE_GPI = 4,
  NCCL_GIN_TYPE_EFA_GDA = 5,
  NCCL_GIN_MAX_TYPES = 6
} ncclGinType_t;

typedef struct {
  size_t size;                               // since 2.29.2
  unsigned int magic;                        // since 2.29.2
  unsigned int version;                      // since 2.29.2
  int rank;                                  // since 2.29.2
  int nRanks;                                // since 2.29.2
  int cudaDev;                               // since 2.29.2
  int nvmlDev;                               // since 2.29.2
  _Bool deviceApiSupport;                    // since 2.29.2
  _Bool multimemSupport;                     // since 2.29.2
  ncclGinType_t ginType;                     // since 2.29.3
  int nLsaTeams;                             // since 2.29.7
  _Bool hostRmaSupport;                      // since 2.29.7
  ncclGinType_t railedGinType;               // since 2.29.7
  uint64_t commHash;                         // since 2.31.2
  int ginMinStride;                          // since 2.31.2
  ncclGinConnectionType_t ginConnectionType; // since 2.31.2
  _Bool ginSupport[64];                      // since 2.31.2
  size_t devCommRuntimeVersionSize;          // since 2.31.2
  _Bool cftSupport;                          // since 2.31.2
  _Bool cftMulticastSupport;                 // since 2.31.2
  _Bool cftCountedSupport;                   // since 2.32.3
} ncclCommProperties_t;

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props); // since 2.29.2

// A peer that this process cannot reach by load and store has no pointer: *outPtr is NULL.
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank, void** outPtr); // since 2.29.2
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** outPtr); // since 2.29.2

// Ranks of a communicator whose numbers are `stride` apart, and this one's number among them.
typedef struct ncclTeam { int nRanks, rank, stride; } ncclTeam_t;

ncclTeam_t ncclTeamWorld(ncclComm_t comm); // since 2.28.3
ncclTeam_t ncclTeamLsa(ncclComm_t comm); // since 2.28.3
ncclTeam_t ncclTeamRail(ncclComm_t comm); // since 2.28.3
int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank); // since 2.28.3
int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank); // since 2.28.3

// A device communicator is what kernels get. Requirements say what it must have; a function below fills one in,
// and ncclDevCommCreate writes the handle that belongs to it.
typedef enum { NCCL_CFT_TEAM_FLAT = 0, NCCL_CFT_TEAM_HIER_MULTIMEM = 1, NCCL_CFT_TEAM_HIER_LSA = 2 } ncclCftTeamMode_t;
typedef enum { NCCL_CFT_NONE = 0, NCCL_CFT = 1, NCCL_CFT_MULTIMEM = 2 } ncclCftCap_t;

typedef uint32_t ncclDevResourceHandle;
typedef ncclDevResourceHandle ncclDevResourceHandle_t;
typedef uint32_t ncclGinSignal_t;
typedef uint32_t ncclGinCounter_t;
typedef uint32_t ncclCftLeId;
typedef ncclCftLeId ncclCftLeId_t;

typedef struct ncclMultimemHandle { void* mcBasePtr; } ncclMultimemHandle_t;
typedef struct ncclLsaBarrierHandle { ncclDevResourceHandle_t bufHandle; int nBarriers; } ncclLsaBarrierHandle_t;
typedef struct ncclGinBarrierHandle { ncclGinSignal_t signal0; ncclDevResourceHandle_t unused; } ncclGinBarrierHandle_t;
typedef struct ncclLLA2AHandle { ncclDevResourceHandle_t bufHandle; uint32_t nSlots; } ncclLLA2AHandle_t;
typedef struct ncclGinOutboxHandle { ncclDevResourceHandle bufHandle; uint32_t size_log2; } ncclGinOutboxHandle;
typedef struct ncclGinInboxA2AHandle { ncclDevResourceHandle bufHandle; ncclGinSignal_t signals; uint32_t size_log2; uint32_t nPeers_rcp32; } ncclGinInboxA2AHandle;

typedef struct ncclDevResourceRequirements {
  struct ncclDevResourceRequirements* next;
  size_t bufferSize, bufferAlign;
  ncclDevResourceHandle_t* outBufferHandle;
  int ginSignalCount;
  int ginCounterCount;
  ncclGinSignal_t* outGinSignalStart;
  ncclGinCounter_t* outGinCounterStart;
} ncclDevResourceRequirements_t;

typedef struct ncclTeamRequirements {
  struct ncclTeamRequirements* next;
  ncclTeam_t team;
  _Bool multimem;
  ncclMultimemHandle_t* outMultimemHandle;
} ncclTeamRequirements_t;

// In 2.28 it had neither size nor version, and its fields differed between releases.
typedef struct {
  size_t size;                                             // since 2.29.2
  unsigned int magic;                                      // since 2.29.2
  unsigned int version;                                    // since 2.29.2
  ncclDevResourceRequirements_t* resourceRequirementsList; // since 2.29.2
  ncclTeamRequirements_t* teamRequirementsList;            // since 2.29.2
  _Bool lsaMultimem;                                       // since 2.29.2
  int barrierCount;                                        // since 2.29.2
  int lsaBarrierCount;                                     // since 2.29.2
  int railGinBarrierCount;                                 // since 2.29.2
  int lsaLLA2ABlockCount;                                  // since 2.29.2
  int lsaLLA2ASlotCount;                                   // since 2.29.2
  _Bool ginForceEnable;                                    // since 2.29.2
  int ginContextCount;                                     // since 2.29.2 = 4
  int ginSignalCount;                                      // since 2.29.2
  int ginCounterCount;                                     // since 2.29.2
  ncclGinConnectionType_t ginConnectionType;               // since 2.29.7
  _Bool ginExclusiveContexts;                              // since 2.29.7
  int ginQueueDepth;                                       // since 2.29.7
  int ginTrafficClass;                                     // since 2.30.3 = NCCL_CONFIG_UNDEF_INT
  int worldGinBarrierCount;                                // since 2.30.3
  _Bool ginStrongSignalsRequired;                          // since 2.30.7 = 1
  _Bool ginVaSignalsRequired;                              // since 2.30.7 = 1
  int ginCustomStride;                                     // since 2.31.2 = 1
  ncclGinType_t ginType;                                   // since 2.31.2
  _Bool useRuntimeVersion;                                 // since 2.31.2
  int cftCaps;                                             // since 2.31.2
  int cftBarrierCount;                                     // since 2.31.2
} ncclDevCommRequirements_t;

// Its layout belongs to a version of NCCL: kernels of that version read it.
typedef struct ncclDevComm ncclDevComm_t;

ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t* reqs, ncclDevComm_t* outDevComm); // since 2.28.3
ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t* devComm); // since 2.28.3
ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t team, int nBarriers, ncclLsaBarrierHandle_t* outHandle, ncclDevResourceRequirements_t* outReq); // since 2.28.3
ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int nBarriers, ncclGinBarrierHandle_t* outHandle, ncclDevResourceRequirements_t* outReq); // since 2.28.7
int ncclLLA2ACalcSlots(int maxElts, int maxEltSize); // since 2.28.3
ncclResult_t ncclLLA2ACreateRequirement(int nBlocks, int nSlots, ncclLLA2AHandle_t* outHandle, ncclDevResourceRequirements_t* outReq); // since 2.28.3
ncclResult_t ncclGinOutboxCreateRequirement(int nBlocks, int size_log2, ncclGinOutboxHandle* outHandle, ncclDevResourceRequirements_t* outReq); // since 2.30.3
ncclResult_t ncclGinInboxA2ACreateRequirement(ncclTeam_t peers, int nBlocks, int size_log2, ncclGinInboxA2AHandle* outHandle, ncclDevResourceRequirements_t* outReq); // since 2.30.3

// Without multicast memory there is no pointer: *outPtr is NULL.
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void** outPtr); // since 2.29.2
ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem, void** outPtr); // since 2.29.2
ncclResult_t ncclGetMultimemDeviceLeInfo(ncclWindow_t window, size_t offset, ncclCftLeId* leId, size_t* leOffset); // since 2.31.2
ncclResult_t ncclGetCftDeviceLeInfo(ncclWindow_t window, size_t offset, int peerCft, ncclTeam_t cftTeam, ncclCftLeId* leId, size_t* leOffset); // since 2.31.2
ncclResult_t ncclGetPeerDeviceLeInfo(ncclWindow_t window, size_t offset, int peerWorld, ncclCftLeId* leId, size_t* leOffset); // since 2.31.2
ncclTeam_t ncclTeamCft(ncclComm_t comm, ncclCftTeamMode_t mode); // since 2.31.2
ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm); // since 2.31.2
