// The c10d backend: one Lane for each device, each operation a Call.
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "messages.hpp"
#include "reduction.hpp"

// torch 2.6 lacks ErrorType. The rest of this file uses names that all versions have.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 6
#define PYNCCL_HAS_ERROR_TYPE
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define PYNCCL_HAS_HOOKS
#define PYNCCL_HAS_WINDOWS
#define PYNCCL_HAS_RECONFIGURE
#endif

namespace pynccl {

using c10d::OpType;
using WorkPtr = intrusive_ptr<c10d::Work>;

constexpr Milliseconds kOfTheGroup{-1};  // as a time-out

// An operation before it is issued. `issue` may run inside a group.
struct Call {
  OpType type = OpType::UNKNOWN;
  std::string name;
  c10::Device device{at::kCPU};
  int peer = -1;  // of a message on a device, outside a batch
  // For the profiler: the root or the other rank of a message, and the sizes of all_to_all_single.
  int other = -1;
  std::vector<int64_t> input_splits, output_splits;
  Tensors inputs, outputs, kept;
  std::function<ncclResult_t(const Api&, ncclComm_t, cudaStream_t)> issue;
  std::function<void()> post;
};

// Operations that torch coalesces. They are issued together at the end of the group; if one is refused, none
// is.
struct Coalesced {
  std::vector<Call> calls;
  TaskPtr task;  // of all calls
  Pace pace = Pace::Awaited;
  std::vector<std::pair<TaskPtr, std::function<void()>>> messages;
  std::vector<TaskPtr> refused;
  std::exception_ptr refusal;  // the first error

  std::vector<TaskPtr> parts() const {
    std::vector<TaskPtr> all = refused;
    for (auto& [message, begin] : messages) all.push_back(message);
    if (task) all.push_back(task);
    return all;
  }
};

// A group's name and ranks for errors. `ranks` are global ranks; empty: use the group's own.
struct Named {
  std::string name;
  std::vector<int64_t> ranks;
};

inline std::string in_brackets(const std::vector<int>& ranks) { return "[" + c10::Join(", ", ranks) + "]"; }

// A device's library and stream, and when it is needed the communicator of the group or of one of its pairs.
struct Lane {
  ApiPtr api;
  c10::Device device{at::kCPU};
  std::string key;      // in the store: the same on all ranks
  bool paired = false;  // of a pair of ranks
  int rank = 0, size = 0;
  std::shared_ptr<Attempt> attempt;                                      // the running attempt to connect
  std::shared_ptr<std::string> tried = std::make_shared<std::string>();  // the id of the previous attempt
  CommPtr comm;
  std::shared_ptr<Queue> queue;       // on the CPU
  std::optional<c10::Stream> stream;  // on a device
  cudaStream_t handle = nullptr;
  std::deque<std::weak_ptr<Task>> issued;  // tasks on the stream that may be unfinished
  // Tensors that peers may write to until the communicator ends.
  std::map<ncclWindow_t, at::Tensor> windows;
};
using LanePtr = std::shared_ptr<Lane>;

// How soon the caller needs the operation, from its options; torch has the field since 2.8.
template <class Options>
auto pace_of(const Options& options, int) -> decltype(options.asyncOp ? Pace::Now : Pace::Now) {
  return options.asyncOp ? Pace::Now : Pace::Awaited;
}
template <class Options>
Pace pace_of(const Options&, long) {
  return Pace::Soon;
}

// The store that this rank serves to the members of its next group, and how they find it.
struct Served {
  intrusive_ptr<c10d::Store> store;
  std::string handle;
};

// A group whose members have met.
struct Joined {
  intrusive_ptr<c10d::Store> store;
  int rank, size;
};

// Provided by Python: the functions of a device's library and, for CUDA, a stream as (id, handle).
struct Provided {
  std::map<std::string, uintptr_t> addresses;
  int64_t stream_id;
  uintptr_t stream;
};
extern std::function<Provided(c10::Device, bool high_priority)> provide;
extern std::function<bool(c10::DeviceIndex)> allocates;
extern std::function<at::Tensor(int64_t size, const at::TensorOptions&)> allocate;
extern std::function<Served()> serve;
extern std::function<Joined(const Served&, int64_t uuid, const std::vector<std::string>& handles,
                            Milliseconds limit, const std::string& group)>
    join;

class Backend : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds limit, bool high_priority = false)
        : c10d::Backend::Options("pynccl", limit), is_high_priority_stream(high_priority) {}
    // Virtual since torch 2.15.
    intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }

    bool is_high_priority_stream;  // of the CUDA stream
  };

  // Without a store it has no members before reconfigure().
  Backend(intrusive_ptr<c10d::Store> store, int rank, int size, const Options& options, bool cpu_only,
          Named named);
  ~Backend() override;
  static intrusive_ptr<Backend> make(intrusive_ptr<c10d::Store> store, int rank, int size,
                                     const Options& options, bool cpu_only, Named named);
  static void end_all(bool abort);  // before Python ends; without `abort` operations in flight complete first
  void release_resources() override;

  const std::string getBackendName() const override { return "pynccl"; }
  // A copy, since torch changes the options before it passes them to split.
  intrusive_ptr<c10d::Backend::Options> getBackendOptions() {
    return c10::make_intrusive<Options>(*options_);
  }
  bool supportsCoalescing() const { return true; }  // virtual since torch 2.7
  bool supportsSplitting() const override { return true; }
  bool supportsShrinking() const { return true; }
  void setTimeout(Milliseconds timeout);
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void suspend();
  void resume();
  std::unordered_map<std::string, uint64_t> getMemoryStats();
  void eagerConnectSingleDevice(at::Device device) override { connected(device); }
  // Both virtual since torch 2.7.
  bool supportsTensorAlloc(c10::DeviceIndex device) { return allocates(device); }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) { return allocate(size, options); }
#ifdef PYNCCL_HAS_ERROR_TYPE
  c10d::ErrorType getError();
#endif
#ifdef PYNCCL_HAS_HOOKS
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override { hooks_->add(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) override { hooks_->remove(id); }
  // On a device an operation completes unseen.
  bool supportsCompletionHooks() const override { return cpu_only_; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override { hooks_->remove_completed(id); }
#endif

#ifdef PYNCCL_HAS_WINDOWS
  friend class Window;
  bool supportsWindow() const override { return true; }
  intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

#ifdef PYNCCL_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  bool isInitialized() override { return bool(store_); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return served().handle; }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void abort();
  void shutdown();
  intrusive_ptr<c10d::Backend> split(const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                     const intrusive_ptr<c10d::Backend::Options>& options);
  uint64_t splits() const { return splits_; }
  intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, int flags = 0,
                                      const intrusive_ptr<c10d::Backend::Options>& options = nullptr);

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  Call all_reduce_call(const at::Tensor& tensor, const ReduceOp& op) const;
  Call all_gather_call(const at::Tensor& output, const at::Tensor& input) const;
  Call all_gather_list_call(const Tensors& outputs, const at::Tensor& input) const;
  Call reduce_scatter_call(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op) const;
  Call reduce_scatter_list_call(const at::Tensor& output, const Tensors& inputs, const ReduceOp& op) const;
  Call all_to_all_call(const Tensors& outputs, const Tensors& inputs) const;
  Call bitwise_call(const at::Tensor& input, const at::Tensor& output, const ReduceOp& op,
                    int64_t slice) const;
  Call merged(std::vector<Call> calls, OpType type, std::string name) const;

  void check_has_members() const;
  void check_root(int64_t root, const char* function) const;
  void check_peer(int peer, const char* argument, c10::Device device) const;
  template <class Options>
  WorkPtr launch(Call call, const Options& options) {
    return launch(std::move(call), options.timeout, pace_of(options, 0));
  }
  WorkPtr launch(Call call, Milliseconds timeout, Pace pace);
  TaskPtr make_task(Call& call, Milliseconds timeout) const;
  void start(Lane& lane, const TaskPtr& task, Call call, Pace pace);
  WorkPtr refused();
  void describe_to_profiler(const Call& call);
  WorkPtr work_of(OpType type, const std::string& name, std::vector<TaskPtr> tasks);
  void check_members(const std::vector<int>& ranks) const;
  struct Meeting;
  Meeting meeting(const std::string& name);
  void meet(
      const std::string& name, const std::vector<int>& ranks = {},
      const std::function<void()>& check = [] {});
  void adopt(c10::Device device, CommPtr comm);
  Options chosen(const intrusive_ptr<c10d::Backend::Options>& options) const;
  Named named_of(const std::vector<int>& ranks) const;
  int64_t global_rank(int rank) const;
  std::string here() const;
  WorkPtr point_to_point(OpType type, const at::Tensor& tensor, int peer, int tag);
  WorkPtr device_message(Call call, const at::Tensor& data, int peer);
  std::shared_ptr<Messages> messages();
  LanePtr lane(c10::Device device, int peer = -1);
  LanePtr open(c10::Device device, int peer);
  // Waits for the other ranks, so the caller must not hold the lock.
  LanePtr connected(c10::Device device, int peer = -1, Milliseconds limit = kOfTheGroup);
  std::shared_ptr<Attempt> connect(const Lane& lane);
  c10::Device barrier_device(const c10d::BarrierOptions& options);
  std::vector<TaskPtr> unfinished();
  void finish_all(const std::string& name);
  using CommCall = std::function<ncclResult_t(Lane&, ncclComm_t)>;
  void for_each_comm(const std::string& name, const CommCall& call);
  std::vector<LanePtr> all_lanes();
  void end(bool abort);
  void leave(bool abort);
#ifdef PYNCCL_HAS_RECONFIGURE
  Served served() const;
  void leave_members();
  void renew(const Joined& joined);
#endif
  std::unique_lock<std::recursive_mutex> entered();

  Home home_;
  const bool cpu_only_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
  intrusive_ptr<c10d::Store> store_;
  std::optional<Stores> stores_;  // of it; they keep the connections that all groups share
  intrusive_ptr<Options> options_;
  std::recursive_mutex mutex_;
  std::map<std::string, LanePtr> lanes_;
  std::shared_ptr<Messages> messages_;
  uint64_t sequence_ = 0, monitored_ = 0, meetings_ = 0;
  std::atomic<bool> ended_, released_;  // released: end() has returned
  std::atomic<bool> final_{false};      // it cannot be reconfigured
  uint64_t groups_ = 0;                 // how often it was reconfigured
  std::optional<Coalesced> coalesced_;
  Named named_;
  // The cached text of here() and its inputs: every operation needs it.
  std::shared_ptr<const std::string> here_;
  std::string here_uid_, here_desc_;
  // The last split and its arguments.
  c10::weak_intrusive_ptr<c10d::Backend> split_{intrusive_ptr<c10d::Backend>()};
  intrusive_ptr<c10d::Store> split_store_;
  std::vector<int> split_ranks_;
  std::map<std::vector<int>, uint64_t> split_counts_;
  std::atomic<uint64_t> splits_{0};
#ifdef PYNCCL_HAS_RECONFIGURE
  mutable std::mutex served_mutex_;
  mutable Served served_;
  std::mutex reconfiguring_;
  std::set<int64_t> uuids_;  // for the thread that reconfigures
#endif
};

}  // namespace pynccl
