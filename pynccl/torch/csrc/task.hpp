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
#include "fork.hpp"

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

constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);

inline const char* const kOfTheParent =
    "pynccl: this belongs to the parent of this forked process; make a new process group here";

inline std::exception_ptr shut_down() {
  try {
    C10_THROW_ERROR(DistBackendError, "pynccl: the process group was shut down");
  } catch (...) {
    return std::current_exception();
  }
}

// Streams of the CPU library. Each operation in flight has its own, so that waiting for one never waits for
// a later one; past the limit those of one communicator share one, and none waits for another one's.
class StreamPool {
 public:
  explicit StreamPool(const Api& api) : api_(api) {}
  ~StreamPool() {
    for (cudaStream_t stream : all_) api_.pyncclCpuStreamDestroy(stream);
  }
  cudaStream_t take(ncclComm_t comm) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      cudaStream_t stream = free_.back();
      free_.pop_back();
      return stream;
    }
    const bool shares = all_.size() - shared_.size() >= kLimit;
    if (shares && shared_.count(comm)) return shared_[comm];
    cudaStream_t stream = nullptr;
    api_.check(api_.pyncclCpuStreamCreateWithFlags(&stream, 1), "pyncclCpuStreamCreateWithFlags");
    all_.push_back(stream);
    if (shares) shared_[comm] = stream;
    return stream;
  }
  void give_back(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [comm, shared] : shared_)
      if (shared == stream) return;
    free_.push_back(stream);
  }

 private:
  static constexpr size_t kLimit = 32;
  const Api& api_;
  std::mutex mutex_;
  std::vector<cudaStream_t> all_, free_;
  std::map<ncclComm_t, cudaStream_t> shared_;
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

  bool foreign() const { return home_.foreign(); }
  bool done() const { return state_.load(std::memory_order_acquire) == Done; }
  std::exception_ptr error() const { return done() ? error_ : nullptr; }
  const c10::Event* end() const { return end_.get(); }

  // Works for or waits for the operation no longer than this; true when it is done.
  bool advance(Milliseconds slice) {
    if (done()) return true;
    if (foreign()) C10_THROW_ERROR(DistBackendError, kOfTheParent);
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
    std::function<void()> last;
    {
      // Who ends the group may fail what another thread is about to finish.
      std::lock_guard<std::mutex> lock(mutex_);
      last.swap(post);
    }
    if (!error && last) {
      try {
        at::AutoDispatchBelowADInplaceOrView no_grad;
        last();
      } catch (...) {
        error = std::current_exception();
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_.load() == Done) return;
      error_ = std::move(error);
      state_.store(Done, std::memory_order_release);
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

  Home home_;
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
class Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  ~Watcher() { stop(); }

  void watch(TaskPtr task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->work(); });
    news_.notify_one();
  }

  bool is_this_thread() {
    std::lock_guard<std::mutex> lock(mutex_);
    return thread_.get_id() == std::this_thread::get_id();
  }

  // Every task must be done, or soon be: the communicators were destroyed.
  void stop() {
    if (home_.foreign()) return forsake(thread_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    news_.notify_one();
    if (is_this_thread())
      thread_.detach();  // a callback has dropped the last reference to the group
    else if (thread_.joinable())
      thread_.join();
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

  Home home_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::list<TaskPtr> tasks_;
  bool stopped_ = false;
  std::thread thread_;
};

class WorkPynccl : public c10d::Work {
 public:
  WorkPynccl(int rank, c10d::OpType type, const std::string& title, std::vector<TaskPtr> tasks,
             uint64_t sequence, std::shared_ptr<Watcher> watcher, std::shared_ptr<const std::string> here)
      : Work(rank, type, title.c_str(), tasks.front()->inputs),
        tasks_(std::move(tasks)),
        sequence_(sequence),
        watcher_(std::move(watcher)),
        here_(std::move(here)) {}

  ~WorkPynccl() override {
    // A device keeps what it needs by itself; and an event that a graph has captured must not be asked.
    for (auto& task : tasks_)
      if (!task->end() && !task->recording() && !task->foreign() && !task->advance(Milliseconds(0)))
        watcher_->watch(task);
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
  std::vector<at::Tensor> result() override { return outputs_of(tasks_); }
  uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override { wait(kNoTimeout); }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    for (auto& task : tasks_) wait_for(*task, timeout);
    settle();
    if (auto error = exception()) std::rethrow_exception(error);
    return true;
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (tasks_.size() == 1) return future_of(tasks_.front());
    auto type = c10::ListType::create(c10::TensorType::get());
    c10::List<intrusive_ptr<c10::ivalue::Future>> parts(c10::FutureType::create(type));
    for (auto& task : tasks_) parts.push_back(future_of(task));
    auto join = [tasks = tasks_](c10::ivalue::Future&) {
      for (auto& task : tasks)
        if (auto error = task->error()) std::rethrow_exception(error);
      return c10::IValue(outputs_of(tasks));
    };
    return c10::collectAll(parts)->then(join, type);
  }

 private:
  static Tensors outputs_of(const std::vector<TaskPtr>& tasks) {
    Tensors all;
    for (auto& task : tasks) all.insert(all.end(), task->outputs.begin(), task->outputs.end());
    return all;
  }

  intrusive_ptr<c10::ivalue::Future> future_of(const TaskPtr& task) {
    auto future = task->future();
    if (future->completed()) return future;
    // In a callback, which may wait for it: nobody else would complete it.
    if (watcher_->is_this_thread())
      wait_for(*task, kNoTimeout);
    else
      watcher_->watch(task);
    return future;
  }

  void wait_for(Task& task, Milliseconds timeout) {
    if (task.recording()) return;
    if (task.end() && timeout.count() <= 0) {
      c10::impl::VirtualGuardImpl device(task.end()->device_type());
      auto stream = device.getStream(task.end()->device());
      task.end()->block(stream);
      if (opType_ == c10d::OpType::BARRIER) stream.synchronize();
      return;
    }
    bool own = timeout.count() > 0;
    timeout = std::min(timeout, kLongest);
    auto deadline = own ? Clock::now() + timeout : task.deadline;
    for (;;) {
      auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
      if (task.advance(std::clamp(left, Milliseconds(1), kSlice))) return;
      check_signals();
      if (Clock::now() >= deadline) {
        auto limit = own ? timeout : task.timeout;
        C10_THROW_ERROR(DistBackendError,
                        c10::str("pynccl: Timed out waiting ", limit.count(), "ms for ", task.name, " (call ",
                                 sequence_, " of the group) on ", *here_,
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
  std::shared_ptr<const std::string> here_;  // the rank and the group
  std::atomic<bool> settled_{false};
};

}  // namespace pynccl
