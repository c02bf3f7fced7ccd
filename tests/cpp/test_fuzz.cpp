// Every exported function with handles, enums, counts, ranks and sizes that make no sense. Pointers are valid
// or NULL, sizes of structs true, and nothing waits for a second rank: what is left may neither crash nor
// hang.
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <random>

#include "failing.hpp"
#include "ranks.hpp"

using namespace testing;

namespace {

constexpr size_t kBytes = 4096;

// Draws arguments. Communicators have one rank, so that a call that is right has nobody to wait for.
class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : random_(seed) {
    for (int i = 0; i < 4; ++i) {
      comms_.push_back(alone());
      streams_.push_back(new_stream());
      events_.push_back(new_event());
    }
  }
  ~Fuzz() {
    sort_out();
    for (ncclComm_t comm : comms_) ncclCommAbort(comm);
    for (cudaStream_t stream : streams_) pyncclCpuStreamDestroy(stream);
    for (cudaEvent_t event : events_) pyncclCpuEventDestroy(event);
    for (void* p : allocated_) ncclMemFree(p);
  }
  ncclResult_t call(size_t function);
  void sort_out();
  static size_t functions();

 private:
  static cudaStream_t new_stream() {
    cudaStream_t stream = nullptr;
    OK(pyncclCpuStreamCreate(&stream));
    return stream;
  }
  static cudaEvent_t new_event() {
    cudaEvent_t event = nullptr;
    OK(pyncclCpuEventCreate(&event));
    return event;
  }

  uint64_t below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random_); }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <class T>
  T one_of(const std::vector<T>& from) {
    return from.empty() ? T() : from[below(from.size())];
  }

  // Mostly a live handle; else one that was, an integer, an address, or one of another kind.
  template <class T>
  T handle(T live) {
    switch (below(10)) {
      case 0:
        return reinterpret_cast<T>(one_of(stale_));
      case 1:
        return reinterpret_cast<T>(one_of(std::vector<uintptr_t>{0, 1, 2, 3, 64, 0x7fffffff, ~uintptr_t(0)}));
      case 2:
        return reinterpret_cast<T>(random_());
      case 3:
        return reinterpret_cast<T>(buffer());
      case 4:
        return reinterpret_cast<T>(one_in(2) ? static_cast<void*>(one_of(streams_)) : comm_);
      case 5:
        return reinterpret_cast<T>(uintptr_t(live) + below(128));
      default:
        return live;
    }
  }
  ncclComm_t comm() { return handle(comm_); }
  cudaStream_t stream() { return one_in(2) ? nullptr : handle(one_of(streams_)); }
  cudaEvent_t event() { return handle(one_of(events_)); }

  int any_int() {
    static const std::vector<int> odd{0, 1, 2, 3, -1, -2, 7, 100, 65536, INT32_MAX, INT32_MIN, INT32_MIN + 1};
    return one_in(8) ? int(random_()) : one_of(odd);
  }
  int rank() { return one_in(3) ? any_int() : 0; }
  int nranks() { return one_in(3) ? any_int() : 1; }
  ncclDataType_t type() { return ncclDataType_t(one_in(4) ? any_int() : int(below(ncclNumTypes))); }
  ncclRedOp_t op() {
    return one_in(4) ? ncclRedOp_t(one_in(2) ? any_int() : made_op_) : ncclRedOp_t(below(5));
  }
  // A count beyond the buffers must be one that no memory holds: what a caller says of its memory is
  // believed.
  size_t count() {
    static const std::vector<size_t> odd{SIZE_MAX, SIZE_MAX / 2 + 1, SIZE_MAX / 8, size_t(1) << 62};
    return one_in(6) ? one_of(odd) : below(kBytes / 8 + 1);
  }
  size_t size() { return one_in(6) ? SIZE_MAX - below(5000) : below(kBytes + 1); }
  void* data() { return one_in(12) ? nullptr : buffer(); }
  // Operations of several communicators run at the same time: each has memory of its own.
  char* buffer() {
    Memory& memory = memory_[comm_];
    if (!memory) {
      memory.reset(static_cast<char*>(aligned_alloc(NCCL_WIN_REQUIRED_ALIGNMENT, 2 * kBytes)));
      memset(memory.get(), 0, 2 * kBytes);
    }
    return memory.get();
  }
  template <class T>
  T* out(T* valid) {
    return one_in(12) ? nullptr : valid;
  }
  ncclUniqueId id() {
    if (one_in(2)) return new_id();
    for (char& c : id_.internal) c = one_in(40) ? char(random_()) : c;
    return id_;
  }
  ncclConfig_t* config();
  ncclCollConfig_t* coll_config();
  // Where a creation writes its communicators: when a group ends, or some time later in the background.
  ncclComm_t* made() { return made_at_.emplace_back(Made{}).data(); }
  ncclWindow_t* window_at() { return &windows_at_.emplace_back(nullptr); }
  // A handle that was live is stale from now on, and a new one takes its place.
  template <class T, class Make>
  ncclResult_t ended(ncclResult_t r, std::vector<T>& live, T handle, Make make) {
    auto at = std::find(live.begin(), live.end(), handle);
    if (r != ncclSuccess || at == live.end()) return r;
    stale_.push_back(handle);
    if (stale_.size() > 100) stale_.erase(stale_.begin());
    *at = make();
    return r;
  }
  using Call = ncclResult_t (*)(Fuzz&);
  static const std::vector<Call>& calls();

  std::mt19937_64 random_;
  std::vector<ncclComm_t> comms_;
  ncclComm_t comm_ = nullptr;  // of these the one that a call is about
  struct Free {
    void operator()(void* p) const { free(p); }
  };
  using Memory = std::unique_ptr<char, Free>;
  std::map<ncclComm_t, Memory> memory_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<void*> stale_, allocated_, registered_;
  std::vector<ncclWindow_t> windows_;
  std::vector<ncclParamHandle_t> params_;
  using Made = std::array<ncclComm_t, 4>;
  std::deque<Made> made_at_;
  std::deque<ncclWindow_t> windows_at_;
  double scalar_ = 2;
  int made_op_ = ncclNumOps;
  ncclUniqueId id_ = new_id();
  ncclConfig_t config_;
  ncclCollConfig_t coll_config_;
  char out_[kBytes];
  friend struct Calls;
};

ncclConfig_t* Fuzz::config() {
  if (one_in(2)) return nullptr;
  memset(static_cast<void*>(&config_), 0, sizeof config_);
  config_.size = one_in(6) ? below(sizeof config_ / 8 + 1) * 8 : sizeof config_;  // no pointer is cut
  config_.magic = one_in(20) ? unsigned(random_()) : NCCL_API_MAGIC;
  config_.version = one_in(6) ? unsigned(any_int()) : 23203;
  int* fields[] = {&config_.cgaClusterSize,
                   &config_.minCTAs,
                   &config_.maxCTAs,
                   &config_.splitShare,
                   &config_.trafficClass,
                   &config_.collnetEnable,
                   &config_.CTAPolicy,
                   &config_.shrinkShare,
                   &config_.nvlsCTAs,
                   &config_.nChannelsPerNetPeer,
                   &config_.nvlinkCentricSched,
                   &config_.graphUsageMode,
                   &config_.numRmaCtx,
                   &config_.maxP2pPeers,
                   &config_.graphStreamOrdering,
                   &config_.launchOrderImplicit,
                   &config_.numRmaSig,
                   &config_.rmaEagerInit,
                   &config_.hostCftMode,
                   &config_.nvlsHostMode};
  for (int* field : fields) *field = one_in(10) ? any_int() : NCCL_CONFIG_UNDEF_INT;
  config_.blocking = one_in(10) ? any_int() : one_in(2) ? NCCL_CONFIG_UNDEF_INT : 1;
  if (one_in(4)) config_.commName = "fuzz";
  return &config_;
}

ncclCollConfig_t* Fuzz::coll_config() {
  if (one_in(3)) return nullptr;
  memset(static_cast<void*>(&coll_config_), 0, sizeof coll_config_);
  coll_config_.size = one_in(6) ? below(sizeof coll_config_ / 8 + 1) * 8 : sizeof coll_config_;
  coll_config_.magic = one_in(20) ? unsigned(random_()) : NCCL_API_MAGIC;
  coll_config_.version = 23203;
  for (int* field : {&coll_config_.minCTAs, &coll_config_.maxCTAs, &coll_config_.nvlsCTAs,
                     &coll_config_.cgaClusterSize, &coll_config_.forceAlgSelection, &coll_config_.CTAPolicy})
    *field = one_in(10) ? any_int() : NCCL_CONFIG_UNDEF_INT;
  return &coll_config_;
}

// Out-values of every type lie in one buffer.
#define OUT(type) f.out(reinterpret_cast<type*>(f.out_))
#define CALL(...)                               \
  calls.push_back([](Fuzz& f) -> ncclResult_t { \
    (void)f;                                    \
    __VA_ARGS__;                                \
  })

struct Calls {
  static void creation(std::vector<Fuzz::Call>& calls) {
    CALL(return ncclGetUniqueId(f.out(&f.id_)));
    CALL(return ncclCommInitRank(f.made(), f.nranks(), f.id(), f.rank()));
    CALL(return ncclCommInitRankConfig(f.made(), f.nranks(), f.id(), f.rank(), f.config()));
    CALL(return ncclCommInitRank(nullptr, f.nranks(), f.id(), f.rank()));
    CALL(int devices[4] = {f.any_int(), f.any_int(), f.any_int(), f.any_int()};
         int n = std::min(f.any_int(), 1); return ncclCommInitAll(f.out(f.made()), n, f.out(devices)));
    CALL(ncclUniqueId ids[3] = {f.id(), f.id(), f.id()};
         int n = f.one_in(2) ? int(f.below(4)) : std::min(f.any_int(), 3);
         return ncclCommInitRankScalable(f.made(), f.nranks(), f.rank(), n, f.out(ids), f.config()));
    CALL(return ncclCommSplit(f.comm(), f.any_int(), f.any_int(), f.made(), f.config()));
    CALL(return ncclCommSplit(f.comm(), f.any_int(), f.any_int(), nullptr, f.config()));
    CALL(int list[4] = {f.any_int(), f.any_int(), f.any_int(), f.any_int()}; int n = std::min(f.any_int(), 4);
         return ncclCommShrink(f.comm(), f.out(list), n, f.made(), f.config(), f.any_int()));
    CALL(return ncclCommGetUniqueId(f.comm(), f.out(&f.id_)));
    CALL(ncclUniqueId id = f.id();
         return ncclCommGrow(f.comm(), f.nranks(), f.out(&id), f.rank(), f.made(), f.config()));
    CALL(return f.one_in(4) ? ncclCommFinalize(f.comm()) : ncclSuccess);
    CALL(ncclComm_t c = f.comm(); return f.ended(ncclCommDestroy(c), f.comms_, c, alone));
    CALL(ncclComm_t c = f.comm(); return f.ended(ncclCommAbort(c), f.comms_, c, alone));
    CALL(return f.one_in(2) ? ncclCommRevoke(f.comm(), f.any_int()) : ncclSuccess);
    CALL(return ncclCommSuspend(f.comm(), f.any_int()));
    CALL(return ncclCommResume(f.comm()));
  }
  static void queries(std::vector<Fuzz::Call>& calls) {
    CALL(return ncclGetVersion(OUT(int)));
    CALL(return ncclGetErrorString(ncclResult_t(f.any_int())) ? ncclSuccess : ncclInternalError);
    CALL(return ncclGetLastError(f.comm()) ? ncclSuccess : ncclInternalError);
    CALL(ncclResetDebugInit(); return ncclSuccess);
    CALL(return ncclCommGetAsyncError(f.comm(), OUT(ncclResult_t)));
    CALL(return ncclCommCount(f.comm(), OUT(int)));
    CALL(return ncclCommCuDevice(f.comm(), OUT(int)));
    CALL(return ncclCommUserRank(f.comm(), OUT(int)));
    CALL(return ncclCommMemStats(f.comm(), ncclCommMemStat_t(f.any_int()), OUT(uint64_t)));
    CALL(ncclCommProperties_t p = {}; p.size = f.one_in(4) ? f.below(sizeof p + 1) : sizeof p;
         p.magic = f.one_in(10) ? 0 : NCCL_API_MAGIC; return ncclCommQueryProperties(f.comm(), f.out(&p)));
    CALL(return pyncclCpuDeviceCount(OUT(int)));
    CALL(return pyncclCpuGetErrorKind(f.comm(), OUT(int)));
    CALL(return pyncclCpuGetErrorPrefix(f.comm(), OUT(int), OUT(int)));
    CALL(return pyncclCpuIsErrorReported(f.comm(), OUT(int)));
    CALL(return pyncclCpuGetLateRank(f.any_int(), OUT(int)));
    CALL(int ranks[20] = {}; ncclUniqueId id = f.id(); return pyncclCpuRefuseToGrow(
             f.comm(), f.below(2) ? nullptr : &id, ncclResult_t(f.any_int()), f.below(2) ? "" : nullptr,
             f.below(2) ? ranks : nullptr, int(f.below(21))));
    CALL(return pyncclCpuLeave(f.comm()));
    CALL(return pyncclCpuIsGone(f.comm(), f.any_int(), OUT(int)));
    CALL(return pyncclCpuIsAwaited(f.comm(), f.any_int(), OUT(int)));
    CALL(return pyncclCpuParentRank(f.comm(), f.any_int(), OUT(int)));
    CALL(return pyncclCpuSignalCount(f.comm(), f.any_int(), f.any_int(), f.any_int(), OUT(uint64_t)));
    CALL(const char* functions[] = {"ncclScatter", "ncclSend", "", nullptr}; return pyncclCpuGetAlgorithm(
             f.comm(), functions[f.below(4)], f.count(), OUT(const char*), OUT(size_t)));
    CALL(return pyncclCpuExchange(f.data(), f.data(), f.count(), f.any_int(), f.comm(), f.stream()));
    CALL(return pyncclCpuQuiet(f.comm()));
    CALL(return pyncclCpuSetDevice(f.any_int()));
    CALL(return pyncclCpuGetDevice(OUT(int)));
    CALL(return pyncclCpuHostId(OUT(uint64_t)));
    CALL(return pyncclCpuInterrupt(f.any_int(), int(f.below(2))));
    CALL(return pyncclCpuCallsFor(f.any_int(), int(f.below(2))));
    CALL(ncclEncryptionConfig_t e = {}; e.size = f.one_in(3) ? f.below(sizeof e / 8 + 1) * 8 : sizeof e;
         e.magic = f.one_in(3) ? 0 : NCCL_API_MAGIC; e.mode = f.any_int();
         return ncclSetEncryption(f.out(&e)));
  }
  static void memory(std::vector<Fuzz::Call>& calls) {
    CALL(void* p = nullptr; size_t n = f.size(); if (f.one_in(12)) return ncclMemAlloc(nullptr, n);
         ncclResult_t r = ncclMemAlloc(&p, n); if (p) f.allocated_.push_back(p);
         if (f.allocated_.size() > 50) ncclMemFree(f.allocated_.front()),
         f.allocated_.erase(f.allocated_.begin());
         return r);
    CALL(return ncclMemFree(f.one_in(2) ? f.buffer() : f.one_of(f.stale_)));
    CALL(void* h = nullptr; ncclResult_t r = ncclCommRegister(f.comm(), f.data(), f.size(), &h);
         if (h) f.registered_.push_back(h); return r);
    CALL(return ncclCommDeregister(f.comm(), f.handle(f.one_of(f.registered_))));
    CALL(return ncclCommWindowRegister(f.comm(), f.data(), f.size(), f.out(f.window_at()),
                                       f.one_in(2) ? 0 : f.any_int()));
    CALL(return ncclCommWindowDeregister(f.comm(), f.handle(f.one_of(f.windows_))));
    CALL(return ncclWinGetUserPtr(f.comm(), f.handle(f.one_of(f.windows_)), OUT(void*)));
    CALL(void* hold = nullptr;
         ncclResult_t r = pyncclCpuWindowHold(f.handle(f.one_of(f.windows_)), f.out(&hold));
         if (!hold) return r; pyncclCpuWindowRelease(hold); return pyncclCpuWindowRelease(hold));
    CALL(ncclRedOp_t made = ncclSum;
         ncclResult_t r = ncclRedOpCreatePreMulSum(
             f.out(&made), f.out(&f.scalar_), f.type(),
             f.one_in(3) ? ncclScalarResidence_t(f.any_int()) : ncclScalarHostImmediate, f.comm());
         if (made != ncclSum) f.made_op_ = int(made); return r);
    CALL(return ncclRedOpDestroy(f.op(), f.comm()));
  }
  static void operations(std::vector<Fuzz::Call>& calls) {
    CALL(return ncclReduce(f.data(), f.data(), f.count(), f.type(), f.op(), f.rank(), f.comm(), f.stream()));
    CALL(return ncclBcast(f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream()));
    CALL(return ncclBroadcast(f.data(), f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream()));
    CALL(return ncclAllReduce(f.data(), f.data(), f.count(), f.type(), f.op(), f.comm(), f.stream()));
    CALL(return ncclReduceScatter(f.data(), f.data(), f.count(), f.type(), f.op(), f.comm(), f.stream()));
    CALL(return ncclAllGather(f.data(), f.data(), f.count(), f.type(), f.comm(), f.stream()));
    CALL(return ncclAlltoAll(f.data(), f.buffer() + kBytes, f.count(), f.type(), f.comm(), f.stream()));
    CALL(return ncclGather(f.data(), f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream()));
    CALL(return ncclScatter(f.data(), f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream()));
    CALL(return ncclAllReduceConfig(f.data(), f.data(), f.count(), f.type(), f.op(), f.comm(), f.stream(),
                                    f.coll_config()));
    CALL(return ncclBroadcastConfig(f.data(), f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream(),
                                    f.coll_config()));
    CALL(return ncclReduceConfig(f.data(), f.data(), f.count(), f.type(), f.op(), f.rank(), f.comm(),
                                 f.stream(), f.coll_config()));
    CALL(return ncclAllGatherConfig(f.data(), f.data(), f.count(), f.type(), f.comm(), f.stream(),
                                    f.coll_config()));
    CALL(return ncclReduceScatterConfig(f.data(), f.data(), f.count(), f.type(), f.op(), f.comm(), f.stream(),
                                        f.coll_config()));
    CALL(return ncclAlltoAllConfig(f.data(), f.buffer() + kBytes, f.count(), f.type(), f.comm(), f.stream(),
                                   f.coll_config()));
    CALL(return ncclGatherConfig(f.data(), f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream(),
                                 f.coll_config()));
    CALL(return ncclScatterConfig(f.data(), f.data(), f.count(), f.type(), f.rank(), f.comm(), f.stream(),
                                  f.coll_config()));
    // The only rank may be its own peer, which is refused without the other half.
    CALL(return ncclSend(f.data(), f.count(), f.type(), f.one_in(2) ? -1 : int(f.below(3)), f.comm(),
                         f.stream()));
    CALL(return ncclRecv(f.data(), f.count(), f.type(), f.one_in(2) ? -1 : int(f.below(3)), f.comm(),
                         f.stream()));
    CALL(ncclGroupStart(); ncclComm_t c = f.comm(); size_t n = f.count(); ncclDataType_t t = f.type();
         ncclResult_t s = ncclSend(f.buffer(), n, t, 0, c, nullptr),
         r = ncclRecv(f.buffer() + kBytes, n, t, 0, c, nullptr);
         ncclResult_t g = ncclGroupEnd(); return s == r ? g : ncclInternalError);
    CALL(return ncclPutSignal(f.data(), f.count(), f.type(), f.any_int(), f.handle(f.one_of(f.windows_)),
                              f.size(), f.any_int(), f.any_int(), unsigned(f.any_int()), f.comm(),
                              f.stream()));
    CALL(return ncclSignal(1 + int(f.below(1000)), f.any_int(), f.any_int(), unsigned(f.any_int()), f.comm(),
                           f.stream()));
    CALL(ncclWaitSignalDesc_t d[2] = {{f.any_int(), 1, f.any_int(), f.any_int()}, {-1, -1, f.any_int(), 0}};
         return ncclWaitSignal(std::min(f.any_int(), 2), f.out(d), f.comm(), f.stream()));
  }
  static void groups(std::vector<Fuzz::Call>& calls) {
    CALL(ncclGroupStart(); int n = 1 + int(f.below(4));
         for (int i = 0; i < n; ++i) f.call(f.below(f.functions())); return ncclGroupEnd());
    CALL(return ncclGroupEnd());
    CALL(ncclGroupStart(); f.call(f.below(f.functions())); ncclSimInfo_t info = {};
         info.size = f.one_in(3) ? f.below(sizeof info + 1) : sizeof info;
         info.magic = f.one_in(3) ? 0 : NCCL_SIM_INFO_MAGIC;
         ncclResult_t r = ncclGroupSimulateEnd(f.out(&info)); if (r != ncclSuccess) ncclGroupEnd(); return r);
    CALL(return ncclGroupSimulateEnd(nullptr));
  }
  static void streams(std::vector<Fuzz::Call>& calls) {
    CALL(return pyncclCpuStreamCreate(nullptr));
    CALL(cudaStream_t s = f.handle(f.one_of(f.streams_));
         return f.ended(pyncclCpuStreamDestroy(s), f.streams_, s, Fuzz::new_stream));
    CALL(return pyncclCpuStreamQuery(f.comm(), f.stream()));
    CALL(return pyncclCpuStreamSynchronize(f.comm(), f.stream(), int64_t(f.below(20))));
    CALL(return pyncclCpuStreamAwait(f.comm(), f.stream(), int64_t(f.below(20))));
    CALL(return pyncclCpuStreamWaitEvent(f.comm(), f.stream(), f.event()));
    CALL(return pyncclCpuEventCreate(nullptr));
    CALL(cudaEvent_t e = f.event(); return f.ended(pyncclCpuEventDestroy(e), f.events_, e, Fuzz::new_event));
    CALL(return pyncclCpuEventRecord(f.comm(), f.event(), f.stream()));
    CALL(return pyncclCpuEventQuery(f.event()));
    CALL(static const int descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
         const int given[] = {descriptor, descriptor, 0, -1, 1 << 30};
         return pyncclCpuEventNotify(f.event(), given[f.below(5)]));
    CALL(return pyncclCpuEventSynchronize(f.event(), int64_t(f.below(20))));
  }
  static void params(std::vector<Fuzz::Call>& calls) {
    CALL(ncclParamHandle_t h = nullptr;
         const char* keys[] = {"NCCL_DEBUG", "PYNCCL_CPU_INLINE_BYTES", "NO_SUCH_KEY", "", nullptr};
         ncclResult_t r = ncclParamBind(f.out(&h), keys[f.below(5)]); if (h) f.params_.push_back(h);
         return r);
    CALL(return ncclParamGetI8(f.handle(f.one_of(f.params_)), OUT(int8_t)));
    CALL(return ncclParamGetI16(f.handle(f.one_of(f.params_)), OUT(int16_t)));
    CALL(return ncclParamGetI32(f.handle(f.one_of(f.params_)), OUT(int32_t)));
    CALL(return ncclParamGetI64(f.handle(f.one_of(f.params_)), OUT(int64_t)));
    CALL(return ncclParamGetU8(f.handle(f.one_of(f.params_)), OUT(uint8_t)));
    CALL(return ncclParamGetU16(f.handle(f.one_of(f.params_)), OUT(uint16_t)));
    CALL(return ncclParamGetU32(f.handle(f.one_of(f.params_)), OUT(uint32_t)));
    CALL(return ncclParamGetU64(f.handle(f.one_of(f.params_)), OUT(uint64_t)));
    CALL(return ncclParamGetStr(f.handle(f.one_of(f.params_)), OUT(const char*)));
    CALL(int n = 0; int most = std::min(f.any_int(), int(kBytes));
         return ncclParamGet(f.handle(f.one_of(f.params_)), f.out(f.out_), most, f.out(&n)));
    CALL(const char* value; int n; const char* keys[] = {"NCCL_DEBUG", "NO_SUCH_KEY", nullptr};
         return ncclParamGetParameter(keys[f.below(3)], f.out(&value), f.out(&n)));
    CALL(const char** table; int n; return ncclParamGetAllParameterKeys(f.out(&table), f.out(&n)));
    CALL(if (f.one_in(1000)) ncclParamDumpAll(); return ncclSuccess);
  }
};

const std::vector<Fuzz::Call>& Fuzz::calls() {
  static const std::vector<Call> all = [] {
    std::vector<Call> made;
    Calls::creation(made);
    Calls::queries(made);
    Calls::memory(made);
    Calls::operations(made);
    Calls::groups(made);
    Calls::streams(made);
    Calls::params(made);
    return made;
  }();
  return all;
}

size_t Fuzz::functions() { return calls().size(); }

// What a rank number makes a call allocate is bounded here, lest the machine pays for it.
ncclResult_t Fuzz::call(size_t function) {
  failing::allowance = 128l << 20;
  comm_ = one_of(comms_);
  return calls()[function](*this);
}

// What creations made is called on, too; the oldest of it ends.
void Fuzz::sort_out() {
  while (ncclGroupEnd() == ncclSuccess) continue;
  constexpr size_t kInTheBackground = 64;
  for (size_t i = made_at_.size() - std::min(made_at_.size(), kInTheBackground); i < made_at_.size(); ++i)
    for (ncclComm_t& at : made_at_[i])
      if (ncclComm_t comm = __atomic_exchange_n(&at, nullptr, __ATOMIC_ACQ_REL)) comms_.push_back(comm);
  for (size_t i = windows_at_.size() - std::min(windows_at_.size(), kInTheBackground); i < windows_at_.size();
       ++i)
    if (ncclWindow_t win = __atomic_exchange_n(&windows_at_[i], nullptr, __ATOMIC_ACQ_REL))
      windows_.push_back(win);
  while (comms_.size() > 12) {
    ncclCommAbort(comms_[4]);
    stale_.push_back(comms_[4]);
    comms_.erase(comms_.begin() + 4);
  }
}

// PYNCCL_TEST_SEED repeats a run, PYNCCL_TEST_CALLS makes it longer.
const uint32_t g_seed = uint32_t(from_environment("PYNCCL_TEST_SEED", 1));
const int g_calls = int(from_environment("PYNCCL_TEST_CALLS", 100000));

void fuzz(uint32_t seed, int number) {
  set("PYNCCL_CPU_INIT_TIMEOUT", "0.02");
  set("PYNCCL_CPU_TIMEOUT", "5");
  printf("     seed %u\n", seed);
  fflush(stdout);
  Fuzz fuzz(seed);
  std::mt19937 which(seed);
  long answers[10] = {};
  if (!kSanitized) {
    rlimit most{rlim_t(4) << 30, rlim_t(4) << 30};
    setrlimit(RLIMIT_AS, &most);
  }
  for (int i = 0; i < number && failures == 0; ++i) {
    size_t function = which() % Fuzz::functions();
    at_step("seed %u, call %d, function %zu", seed, i, function);
    Stopwatch watch;
    ncclResult_t r = fuzz.call(function);
    fuzz.sort_out();
    CHECK(unsigned(r) <= ncclTimeout);
    CHECK(r != ncclInternalError);
    CHECK(watch.seconds() < 30);
    if (failures) fprintf(stderr, "%s: %s: %s\n", current_step, name_of(r), last_error().c_str());
    ++answers[std::min(unsigned(r), 9u)];
  }
  for (int r = 0; r < 9; ++r)
    if (answers[r]) printf("     %ld %s\n", answers[r], name_of(ncclResult_t(r)));
  CHECK(answers[ncclSuccess] > number / 10);
}

TEST_CASE("one thread") { fuzz(g_seed, g_calls / (kSanitized ? 2 : 1)); }

// Threads that draw their own arguments, and the handles of which the others cannot know.
TEST_CASE("four threads") {
  as_threads(4, [](int t) { fuzz(g_seed + 1 + uint32_t(t), g_calls / (kSanitized ? 16 : 8)); });
}

}  // namespace
