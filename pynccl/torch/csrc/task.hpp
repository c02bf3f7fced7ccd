// One issued operation and who waits for it: Task, the thread that completes futures, and c10d's Work.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "api.hpp"

namespace pynccl {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using c10::intrusive_ptr;
using Tensors = std::vector<at::Tensor>;

// Between two slices signals are handled; within one, the waiting thread works for the CPU library.
constexpr Milliseconds kSlice{100};

// Ctrl-C, also where the caller has released the GIL.
inline void check_signals() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// Streams of the CPU library. Each operation in flight has its own, so that waiting for one never waits for
// a later one; past the limit they are shared.
class StreamPool {
 public:
  explicit StreamPool(const Api& api) : api_(api) {}
  ~StreamPool() {
    for (cudaStream_t stream : all_) api_.pyncclCpuStreamDestroy(stream);
  }
  cudaStream_t take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      cudaStream_t stream = free_.back();
      free_.pop_back();
      return stream;
    }
    if (all_.size() >= kLimit) return all_[next_++ % kLimit];
    cudaStream_t stream = nullptr;
    api_.check(api_.pyncclCpuStreamCreate(&stream), "pyncclCpuStreamCreate");
    all_.push_back(stream);
    return stream;
  }
  void give_back(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(free_.begin(), free_.end(), stream) == free_.end()) free_.push_back(stream);
  }

 private:
  static constexpr size_t kLimit = 32;
  const Api& api_;
  std::mutex mutex_;
  std::vector<cudaStream_t> all_, free_;
  size_t next_ = 0;
};

class Task {
 public:
  std::string name;
  Tensors inputs, outputs, kept;
  std::function<void()> post;  // runs once, when the data is there
  Clock::time_point deadline;
  Milliseconds timeout{};
  std::atomic<int> source{-1};

  // On the CPU library.
  void issued(const Api& api, ncclComm_t comm, cudaStream_t stream, std::shared_ptr<StreamPool> pool) {
    api_ = &api, comm_ = comm, stream_ = stream, pool_ = std::move(pool);
    become(Running);
  }
  // On a device: done when the event has happened.
  void issued(std::unique_ptr<c10::Event> end, c10::Stream stream) {
    end_ = std::move(end);
    device_stream_ = stream;
    become(Running);
  }
  void fail(std::exception_ptr error) { finish(std::move(error)); }
  void succeed() { finish(nullptr); }
  // A part of a group that is not issued before its end.
  void set_recording(bool on) { recording_.store(on); }
  bool recording() const { return recording_.load(); }

  bool done() const { return state_.load(std::memory_order_acquire) == Done; }
  std::exception_ptr error() const { return done() ? error_ : nullptr; }
  const c10::Event* end() const { return end_.get(); }

  // Works for or waits for the operation no longer than this; true when it is done.
  bool advance(Milliseconds slice) {
    if (done()) return true;
    if (state_.load() == Deferred && !wait_issued(slice)) return false;
    if (end_) return advance_event(slice);
    if (!api_) return done();
    std::unique_lock<std::timed_mutex> driving(drive_, std::defer_lock);
    if (slice.count() == 0 ? !driving.try_lock() : !driving.try_lock_for(slice)) return false;
    if (done()) return true;
    ncclResult_t result = slice.count() == 0
                              ? api_->pyncclCpuStreamQuery(comm_, stream_)
                              : api_->pyncclCpuStreamSynchronize(comm_, stream_, slice.count());
    if (result == ncclInProgress) return false;
    finish(result == ncclSuccess ? nullptr : failure(result));
    return true;
  }

  // On a device it is complete at once, as the stream sees it.
  intrusive_ptr<c10::ivalue::Future> future() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (future_) return future_;
    std::vector<c10::Device> devices;
    if (end_) devices.push_back(end_->device());
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    bool complete = done() || end_;
    lock.unlock();
    if (complete) complete_future(future_);
    return future_;
  }

 private:
  enum State { Deferred, Running, Done };

  void become(State state) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_.load() == Done) return;
      state_.store(state);
    }
    changed_.notify_all();
  }

  bool wait_issued(Milliseconds slice) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, slice, [this] { return state_.load() != Deferred; });
  }

  bool advance_event(Milliseconds slice) {
    auto until = Clock::now() + slice;
    while (!end_->query()) {
      if (Clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    finish(nullptr);
    return true;
  }

  std::exception_ptr failure(ncclResult_t result) const {
    try {
      api_->check(result, name, comm_);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void finish(std::exception_ptr error) {
    intrusive_ptr<c10::ivalue::Future> waiting;
    if (!error && post) {
      try {
        at::AutoDispatchBelowADInplaceOrView no_grad;
        post();
      } catch (...) {
        error = std::current_exception();
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_.load() == Done) return;
      error_ = std::move(error);
      state_.store(Done, std::memory_order_release);
      post = nullptr;
      kept.clear();
      if (pool_) pool_->give_back(stream_);
      pool_.reset();
      if (!end_) waiting = future_;
    }
    changed_.notify_all();
    if (waiting) complete_future(waiting);
  }

  void complete_future(const intrusive_ptr<c10::ivalue::Future>& future) {
    c10::OptionalStreamGuard guard;
    if (device_stream_) guard.reset_stream(*device_stream_);
    if (error_)
      future->setErrorIfNeeded(error_);
    else
      future->markCompleted(c10::IValue(outputs));
  }

  const Api* api_ = nullptr;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<StreamPool> pool_;
  std::unique_ptr<c10::Event> end_;
  std::optional<c10::Stream> device_stream_;
  std::atomic<State> state_{Deferred};
  std::atomic<bool> recording_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::timed_mutex drive_;
  intrusive_ptr<c10::ivalue::Future> future_;
};

using TaskPtr = std::shared_ptr<Task>;

// Finishes what nobody waits for: futures with callbacks, and works that were dropped.
class Watcher {
 public:
  ~Watcher() { stop(); }

  void watch(TaskPtr task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    news_.notify_one();
  }

  // Every task must be done, or soon be: the communicators were destroyed.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    news_.notify_one();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
  }

 private:
  void work() {
    std::list<TaskPtr> mine;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        news_.wait(lock, [&] { return stopped_ || !tasks_.empty() || !mine.empty(); });
        if (stopped_) return;
        mine.splice(mine.end(), tasks_);
      }
      // Waiting drives the work; with several to watch none may hold the others up.
      Milliseconds slice = mine.size() == 1 ? Milliseconds(5) : Milliseconds(1);
      for (auto at = mine.begin(); at != mine.end(); slice = Milliseconds(0))
        at = (*at)->advance(slice) ? mine.erase(at) : std::next(at);
    }
  }

  std::mutex mutex_;
  std::condition_variable news_;
  std::list<TaskPtr> tasks_;
  bool stopped_ = false;
  std::thread thread_;
};

class WorkPynccl : public c10d::Work {
 public:
  WorkPynccl(int rank, c10d::OpType type, const std::string& title, std::vector<TaskPtr> tasks,
             uint64_t sequence, std::shared_ptr<Watcher> watcher)
      : Work(rank, type, title.c_str(), tasks.front()->inputs),
        tasks_(std::move(tasks)),
        sequence_(sequence),
        watcher_(std::move(watcher)) {}

  ~WorkPynccl() override {
    for (auto& task : tasks_)
      if (!task->advance(Milliseconds(0))) watcher_->watch(task);
  }

  bool isCompleted() override {
    for (auto& task : tasks_)
      if (!task->advance(Milliseconds(0))) return false;
    settle();
    return true;
  }

  bool isSuccess() const override { return !exception(); }

  std::exception_ptr exception() const override {
    for (auto& task : tasks_)
      if (auto error = task->error()) return error;
    return nullptr;
  }

  int sourceRank() const override { return tasks_.front()->source.load(); }
  std::vector<at::Tensor> result() override { return tasks_.front()->outputs; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override { wait(kNoTimeout); }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    for (auto& task : tasks_) wait_for(*task, timeout);
    settle();
    if (auto error = exception()) std::rethrow_exception(error);
    return true;
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = tasks_.front()->future();
    if (!future->completed()) watcher_->watch(tasks_.front());
    return future;
  }

 private:
  void wait_for(Task& task, Milliseconds timeout) {
    if (task.recording()) return;
    if (task.end() && timeout.count() <= 0) {
      c10::impl::VirtualGuardImpl device(task.end()->device_type());
      task.end()->block(device.getStream(task.end()->device()));
      return;
    }
    bool own = timeout.count() > 0;
    auto deadline = own ? Clock::now() + timeout : task.deadline;
    for (;;) {
      auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
      if (task.advance(std::clamp(left, Milliseconds(1), kSlice))) return;
      check_signals();
      if (Clock::now() >= deadline) {
        auto limit = own ? timeout : task.timeout;
        C10_THROW_ERROR(DistBackendError,
                        c10::str("pynccl: Timed out waiting ", limit.count(), "ms for ", task.name, " (call ",
                                 sequence_, " of the group) on rank ", rank_,
                                 ". The operation goes on: wait again, or abort the group."));
      }
    }
  }

  // Tells the profiler.
  void settle() {
    bool first = !settled_.exchange(true);
    if (first) finish(exception());
  }

  std::vector<TaskPtr> tasks_;
  uint64_t sequence_;
  std::shared_ptr<Watcher> watcher_;
  std::atomic<bool> settled_{false};
};

}  // namespace pynccl
