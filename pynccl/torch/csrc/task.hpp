// One operation: Task, and c10d's Work, which waits for it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "alarm.hpp"
#include "comm.hpp"
#include "hooks.hpp"

namespace pynccl {

using Tensors = std::vector<at::Tensor>;

// Handles Ctrl-C, even if the caller has released the GIL.
inline void check_signals() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// Releases the GIL where this thread has it: a thread that it waits for may need it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

inline const char* const kOfTheParent =
    "pynccl: this belongs to the parent of this forked process; make a new process group here";

inline std::exception_ptr error_of(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

inline std::exception_ptr shut_down() { return error_of("pynccl: the process group was shut down"); }

// Its data without gaps, whose memory stays if the program gives the tensor other memory (set_) meanwhile.
inline at::Tensor dense(const at::Tensor& tensor) { return tensor.contiguous().variable_data(); }

class Runner;

class Task {
 public:
  std::string name;
  Tensors inputs, outputs, kept;
  std::function<void()> post;  // runs once, when the data is there
  Clock::time_point deadline = Clock::time_point::max();
  Milliseconds timeout{};
  std::atomic<int> source{-1};
  int peer = -1;  // of a message to or from one rank
  // On the CPU library; both are set before another thread sees the task. A receive from any source has no
  // runner.
  std::function<ncclResult_t(const Api&, ncclComm_t, cudaStream_t)> issue;
  std::shared_ptr<Runner> runner;

  // On a device: done when the event has happened.
  void issued(std::unique_ptr<c10::Event> end, c10::Stream stream, CommPtr comm) {
    end_ = std::move(end), device_stream_ = stream, comm_ = std::move(comm);
  }
  void fail(std::exception_ptr error) { finish(std::move(error)); }
  void succeed() { finish(nullptr); }
  // The data has arrived, or the operation has failed. Only the first call has an effect.
  void finish(std::exception_ptr error);
  // A part of a group; it is issued at the end of the group.
  void set_recording(bool on) { recording_.store(on); }
  bool recording() const { return recording_.load(); }

  bool foreign() const { return home_.foreign(); }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Its time is over, though it goes on if it is not done. The host does not watch operations on a device.
  bool overdue() const { return !end_ && !recording() && Clock::now() >= deadline; }
  std::exception_ptr error() const { return done() ? error_ : nullptr; }
  const c10::Event* end() const { return end_.get(); }
  // The asynchronous error of its communicator on a device. ProcessGroupNCCL's watchdog polls it; here every
  // wait() does. Not tested on a GPU.
  std::exception_ptr device_error() const;

  // The ranks whose calls are missing, for a message; empty if the library does not tell.
  std::string missing() const;

  // Runs or waits for the operation for this time at most; true: it is done.
  bool advance(Milliseconds slice);
  // Leaves the work and its callbacks to other threads.
  bool await(Milliseconds slice);
  // Has this counted once the operation has succeeded.
  void report(std::shared_ptr<Completion> completion);
  // No thread waits for it.
  void hurry();
  // Whether the caller is a callback in the thread that would run it.
  bool needs_this_thread() const;
  // On a device it is complete immediately, in stream order.
  intrusive_ptr<c10::ivalue::Future> future();
  // Ends the future, unless the operation is done before.
  void expire(std::exception_ptr error);
  // Has this called at the deadline, unless the operation is done before.
  void at_deadline(Alarm::Call call);
  bool has_future() {
    std::lock_guard<std::mutex> lock(mutex_);
    return bool(future_);
  }

 private:
  bool advance_event(Milliseconds slice);
  void complete_future(const intrusive_ptr<c10::ivalue::Future>& future);

  Home home_;
  CommPtr comm_;
  std::unique_ptr<c10::Event> end_;
  std::optional<c10::Stream> device_stream_;
  std::atomic<bool> done_{false}, recording_{false};
  bool finishing_ = false;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  intrusive_ptr<c10::ivalue::Future> future_;
  std::optional<Alarm::Key> alarm_;
  std::vector<std::shared_ptr<Completion>> completions_;
};

using TaskPtr = std::shared_ptr<Task>;

inline std::exception_ptr Task::device_error() const {
  if (!comm_) return nullptr;
  try {
    comm_->api().check(comm_->state(), name, comm_->handle());
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

inline intrusive_ptr<c10::ivalue::Future> Task::future() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (future_) return future_;
  std::vector<c10::Device> devices;
  if (end_) devices.push_back(end_->device());
  auto made =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future_ = made;
  bool complete = done() || end_;
  lock.unlock();
  if (complete) complete_future(made);
  return made;
}

inline void Task::expire(std::exception_ptr error) {
  intrusive_ptr<c10::ivalue::Future> over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (finishing_) return;
    over.swap(future_);
    alarm_.reset();
  }
  if (over) over->setErrorIfNeeded(error);
}

inline void Task::at_deadline(Alarm::Call call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!done() && !alarm_) alarm_ = Alarm::set(deadline, std::move(call));
}

inline void Task::report(std::shared_ptr<Completion> completion) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) return completions_.push_back(std::move(completion));
    if (error_) return;
  }
  completion->count();
}

inline bool Task::advance_event(Milliseconds slice) {
  auto until = Clock::now() + slice;
  while (!end_->query()) {
    if (auto error = device_error()) {
      finish(error);
      return true;
    }
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  finish(nullptr);
  return true;
}

inline void Task::finish(std::exception_ptr error) {
  intrusive_ptr<c10::ivalue::Future> waiting;
  std::function<void()> last;
  decltype(completions_) completions;
  std::optional<Alarm::Key> alarm;
  std::tuple<Tensors, decltype(issue)> gone;  // may need the GIL to be destroyed: not under the lock
  {
    // The end of the group may fail a task that another thread is finishing.
    std::lock_guard<std::mutex> lock(mutex_);
    if (finishing_) return;
    finishing_ = true;
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
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    kept.swap(std::get<0>(gone)), issue.swap(std::get<1>(gone));
    completions.swap(completions_);
    alarm.swap(alarm_);
    if (!end_) waiting = future_;
  }
  changed_.notify_all();
  if (alarm) Alarm::unset(*alarm);
  if (!error_)
    for (auto& completion : completions) completion->count();
  if (waiting) complete_future(waiting);
}

inline void Task::complete_future(const intrusive_ptr<c10::ivalue::Future>& future) {
  c10::OptionalStreamGuard guard;
  if (device_stream_) guard.reset_stream(*device_stream_);
  if (error_)
    future->setErrorIfNeeded(error_);
  else
    future->markCompleted(c10::IValue(outputs));
}

class WorkPynccl : public c10d::Work {
 public:
  WorkPynccl(int rank, c10d::OpType type, const std::string& title, std::vector<TaskPtr> tasks,
             uint64_t sequence, std::shared_ptr<const std::string> here, std::shared_ptr<const Hooks> hooks)
      : Work(rank, type, title.c_str(), tasks.front()->inputs),
        tasks_(std::move(tasks)),
        sequence_(sequence),
        here_(std::move(here)),
        hooks_(std::move(hooks)) {
    if (!hooks_->wants_completions()) return;
    auto completion = std::make_shared<Completion>(hooks_, key_, tasks_.size());
    for (auto& task : tasks_) task->report(completion);
  }

  ~WorkPynccl() override {
    // A device keeps its tensors by itself, and an event that a graph has captured must not be queried.
    for (auto& task : tasks_)
      if (!task->end() && !task->foreign() && !task->done()) task->hurry();
  }

  bool isCompleted() override {
    for (auto& task : tasks_)
      if (!task->advance(Milliseconds(0)) && !task->overdue()) return false;
    settle();
    return true;
  }

  bool isSuccess() const override { return !exception(); }

  std::exception_ptr exception() const override {
    for (auto& task : tasks_) {
      if (auto error = task->error()) return error;
      if (!task->done() && task->overdue()) return timed_out(*task, task->timeout, sequence_, *here_);
    }
    return nullptr;
  }

  int sourceRank() const override { return tasks_.front()->source.load(); }
  std::vector<at::Tensor> result() override { return outputs_of(tasks_); }
  uint64_t getSequencenumber() const override { return sequence_; }
  uint64_t getCompletionKey() const { return key_; }  // virtual since torch 2.15
  void synchronize() override { wait(kNoTimeout); }

  bool wait(Milliseconds timeout = kNoTimeout) override {
    for (auto& task : tasks_) wait_for(*task, timeout);
    settle();
    if (auto error = exception()) {
      hooks_->failing();
      std::rethrow_exception(error);
    }
    return true;
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (tasks_.size() == 1) return future_of(tasks_.front());
    auto type = c10::ListType::create(c10::TensorType::get());
    c10::List<intrusive_ptr<c10::ivalue::Future>> parts(c10::FutureType::create(type));
    for (auto& task : tasks_) parts.push_back(future_of(task));
    auto join = [tasks = tasks_](c10::ivalue::Future& all) {
      if (all.hasError()) std::rethrow_exception(all.exception_ptr());
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

  static std::exception_ptr timed_out(const Task& task, Milliseconds limit, uint64_t sequence,
                                      const std::string& here) {
    return error_of(c10::str("pynccl: Timed out waiting ", limit.count(), "ms for ", task.name, " (call ",
                             sequence, " of the group) on ", here, task.missing(),
                             ". The operation goes on: wait for its work again, or destroy the group."));
  }

  intrusive_ptr<c10::ivalue::Future> future_of(const TaskPtr& task) {
    auto future = task->future();
    if (future->completed()) return future;
    task->at_deadline([weak = std::weak_ptr<Task>(task), sequence = sequence_, here = here_, hooks = hooks_] {
      if (!Py_IsInitialized()) return;
      auto task = weak.lock();
      if (!task || task->done()) return;
      hooks->failing();
      task->expire(timed_out(*task, task->timeout, sequence, *here));
    });
    // A callback waits for it, so this thread must complete it.
    task->needs_this_thread() ? wait_for(*task, kNoTimeout) : task->hurry();
    return future;
  }

  void wait_for(Task& task, Milliseconds timeout) {
    if (task.recording()) return;
    if (task.end() && timeout.count() <= 0) {
      c10::impl::VirtualGuardImpl device(task.end()->device_type());
      auto stream = device.getStream(task.end()->device());
      task.end()->block(stream);
      if (auto error = task.device_error()) std::rethrow_exception(error);
      if (opType_ == c10d::OpType::BARRIER) stream.synchronize();
      return;
    }
    bool own = timeout.count() > 0;
    timeout = std::min(timeout, kLongest);
    auto deadline = own ? Clock::now() + timeout : task.deadline;
    for (;;) {
      auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
      if (task.advance(std::clamp(left, Milliseconds(1), kSlice))) return;
      try {
        check_signals();
      } catch (...) {
        task.hurry();  // as long as the exception lives, so does the Work
        throw;
      }
      if (Clock::now() >= deadline) {
        task.hurry();
        hooks_->failing();
        std::rethrow_exception(timed_out(task, own ? timeout : task.timeout, sequence_, *here_));
      }
    }
  }

  // Tells the profiler.
  void settle() {
    bool first = !settled_.exchange(true);
    if (first) finish(exception());
  }

  static uint64_t new_key() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const uint64_t key_ = new_key();  // before the constructor's body uses it
  std::vector<TaskPtr> tasks_;
  uint64_t sequence_;
  std::shared_ptr<const std::string> here_;  // the rank and the group
  std::shared_ptr<const Hooks> hooks_;
  std::atomic<bool> settled_{false};
};

}  // namespace pynccl
