// Runs the operations of a communicator of the CPU library: in the thread that waits for one of them,
// otherwise in one thread for each communicator.
#pragma once

#include <c10/util/SmallVector.h>

#include <deque>

#include "task.hpp"

namespace pynccl {

// Callbacks may take any time; the end of a group waits for them no longer than this.
inline void fail_all(std::vector<TaskPtr> tasks, std::exception_ptr error, Clock::time_point until) {
  if (tasks.empty()) return;
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  auto state = std::make_shared<State>();
  std::thread([state, tasks = std::move(tasks), error]() mutable {
    for (auto& task : tasks) {
      if (!Py_IsInitialized()) return forsake(tasks);
      task->fail(error);
    }
    tasks.clear();
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->changed.wait_until(lock, until, [&] { return state->done; });
}

// When the runner's own thread starts an operation. Awaited: never, since its caller waits. Soon: if no
// caller waits for it soon. Now: immediately; but as Soon, if callers are in the habit of waiting for what
// they start before it is done: a caller that runs operations needs no change of thread.
enum class Pace { Awaited, Soon, Now };

class Runner : public std::enable_shared_from_this<Runner> {
 public:
  explicit Runner(ApiPtr api) : api_(std::move(api)) {}
  Runner(const Runner&) = delete;
  virtual ~Runner() {
    if (home_.foreign()) {
      forsake(thread_);
      return;
    }
    // Its own thread may hold the last reference.
    if (thread_.joinable()) is_this_thread() ? thread_.detach() : thread_.join();
    if (stream_) api_->pyncclCpuStreamDestroy(stream_);
  }

  // Starts the tasks that were queued before.
  void connected(CommPtr comm) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) return;
    // 3: non-blocking and without a thread, since the runner has one.
    api_->check(api_->pyncclCpuStreamCreateWithFlags(&stream_, 3), "pyncclCpuStreamCreateWithFlags");
    comm_ = std::move(comm);
    if (busy()) take_over();
    changed_.notify_all();
  }

  // nullptr before it is connected.
  CommPtr comm() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return comm_;
  }

  // Runs work, or waits while another thread does, until the task is done or the slice is over.
  void help(const Task& task, Milliseconds slice) {
    const auto until = Clock::now() + slice;
    std::unique_lock<std::mutex> lock(mutex_);
    if (unseen_ && !task.done()) ++habit_, unseen_ = false;
    while (!task.done()) {
      auto left = std::chrono::ceil<Milliseconds>(until - Clock::now());
      if (left.count() <= 0) break;
      if (can_run()) {
        turn(lock, left);
        continue;
      }
      ++waiting_;
      changed_.wait_until(lock, until);
      --waiting_;
    }
    if (can_run() && (hurried_ || (watched_ && !ticking_))) news_.notify_one();
  }

  void hurry() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_ && busy()) take_over();
  }

  bool is_this_thread() {
    std::lock_guard<std::mutex> lock(mutex_);
    return thread_.get_id() == std::this_thread::get_id();
  }

  std::vector<TaskPtr> open() {
    std::lock_guard<std::mutex> lock(mutex_);
    return left();
  }

  // All tasks fail from now on. Takes as long as the library needs to end a communicator.
  void close(std::exception_ptr error, bool abort) {
    CommPtr comm;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = error;
      comm = comm_;
      abort = abort || midway();
    }
    if (comm) comm->end(abort);
    stop(error);
  }

  // Fails the remaining tasks and ends the thread.
  void stop(std::exception_ptr error) {
    std::vector<TaskPtr> tasks;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!error_) error_ = error;
      error = error_;
      news_.notify_all();
      // The library may use the tasks' memory until the communicator has ended.
      changed_.wait_for(lock, std::chrono::seconds(2), [this] { return !running_; });
      tasks = left();
      forget();
    }
    const auto until = Clock::now() + kCallbacks;
    fail_all(std::move(tasks), error, until);
    changed_.notify_all();
    std::thread thread;
    bool ended = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id())
        ended = changed_.wait_until(lock, until, [this] { return ended_; });
      // A callback may have dropped the last reference to the group, or another thread may end it, too.
      if (thread_.get_id() != std::this_thread::get_id())
        thread.swap(thread_);
      else if (thread_.joinable())
        thread_.detach();
    }
    if (thread.joinable()) ended ? thread.join() : thread.detach();
  }

 protected:
  struct Finished {
    TaskPtr task;
    std::exception_ptr error;
  };
  using AllFinished = c10::SmallVector<Finished, 2>;

  // Some work, for the thread that has the turn, without the lock.
  virtual void step(Milliseconds slice, AllFinished& finished) = 0;
  // Under the lock: whether there is work, for which task, and whether the library has begun an operation
  // that does not end by itself.
  virtual bool busy() const = 0;
  virtual std::vector<TaskPtr> left() const = 0;
  virtual void forget() = 0;
  virtual bool midway() const = 0;

  // Under the lock.
  void expect(Pace pace) {
    asynchronous_ = pace != Pace::Awaited;
    if (!asynchronous_) return;
    unseen_ = true;
    if (pace == Pace::Now && habit_ < kHabit) return take_over();
    watched_ = true;
    if (ticking_) return;
    start();
    news_.notify_one();
  }

  ncclResult_t synchronize(Milliseconds slice) {
    // The stream belongs to this communicator and outlives it.
    return api_->pyncclCpuStreamSynchronize(nullptr, stream_, slice.count());
  }

  std::exception_ptr failure(ncclResult_t result, const std::string& name) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (error_) return error_;
    }
    try {
      comm_->check_settled(result, name);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  ApiPtr api_;
  Home home_;
  mutable std::mutex mutex_;
  CommPtr comm_;  // nullptr before it is connected
  cudaStream_t stream_ = nullptr;
  std::exception_ptr error_;  // of its end, or of the connection

 private:
  using Microseconds = std::chrono::microseconds;
  // How long work is left to waiting threads; grows if they run it, since a look at them takes time from
  // them: 30 us on a virtual machine.
  static constexpr Microseconds kLeastGrace{100}, kMostGrace{4000};
  static constexpr int kIdleTicks = 20;
  // Times that callers must have come early, one after another.
  static constexpr int kHabit = 8;
  static constexpr std::chrono::seconds kCallbacks{3};

  bool can_run() const { return !running_ && !error_ && comm_ && busy(); }

  void start() {
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->work(); });
  }

  void take_over() {
    hurried_ = true;
    if (!comm_) return;
    start();
    // Otherwise a thread that has the turn does it.
    if (!running_) news_.notify_one();
  }

  void turn(std::unique_lock<std::mutex>& lock, Milliseconds slice) {
    running_ = true;
    lock.unlock();
    AllFinished finished;
    step(slice, finished);
    lock.lock();
    running_ = false;
    if (!finished.empty()) {
      // Callbacks may need other operations of this communicator.
      auto has_callbacks = [](const Finished& one) { return one.task->has_future(); };
      if (can_run() && std::any_of(finished.begin(), finished.end(), has_callbacks)) take_over();
      lock.unlock();
      for (auto& [task, error] : finished) task->finish(error);
      const size_t count = finished.size();
      finished.clear();  // destroying a task may need the GIL
      lock.lock();
      finished_ += count;
    }
    if (!busy()) hurried_ = false;
    if (waiting_ || error_) changed_.notify_all();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto has_work = [this] { return error_ || (hurried_ && can_run()); };
    auto grace = kLeastGrace;
    for (int ticks = 0; !error_;) {
      if (hurried_ && can_run()) {
        turn(lock, kSlice);
        if (unseen_) habit_ = 0;
        ticks = 0;
      } else if (watched_) {
        // Threads that queue work meanwhile need not wake this thread.
        ticking_ = true;
        const uint64_t before = finished_;
        if (news_.wait_for(lock, grace, has_work)) {
          ticks = 0;
        } else if (finished_ != before) {
          grace = std::min(2 * grace, kMostGrace), ticks = 0;
          watched_ = asynchronous_;
        } else if (can_run()) {
          hurried_ = true, grace = kLeastGrace;
        } else if (++ticks >= kIdleTicks) {
          watched_ = busy(), ticks = 0;
          if (watched_) break_off(lock, has_work);
        }
        ticking_ = false;
      } else {
        news_.wait(lock, [&] { return has_work() || watched_; });
      }
    }
    ended_ = true;
    changed_.notify_all();
  }

  // Waits while another thread works or the connection is missing; both notify.
  void break_off(std::unique_lock<std::mutex>& lock, const std::function<bool()>& has_work) {
    ticking_ = false;
    news_.wait(lock, [&] { return has_work() || can_run() || !busy(); });
  }

  std::condition_variable changed_, news_;
  bool running_ = false;  // a thread has the turn
  bool hurried_ = false;  // the runner's thread takes the turn when it can, until no work is left
  bool watched_ = false;  // the runner's thread waits for a while whether callers run the work
  bool ticking_ = false;
  bool asynchronous_ = false;  // the last operation
  bool unseen_ = false;        // no caller has waited for an operation since the last asynchronous one
  bool ended_ = false;         // its thread has
  int waiting_ = 0;
  int habit_ = 0;  // times that callers waited for asynchronous operations before they were done
  uint64_t finished_ = 0;
  std::thread thread_;
};

// Operations in order: those of a group, and the messages to one peer.
class Queue final : public Runner {
 public:
  using Runner::Runner;

  void push(const TaskPtr& task, Pace pace) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (auto error = error_) {
      lock.unlock();
      return task->fail(error);
    }
    tasks_.push_back(task);
    expect(pace);
  }

  // As the last word about the connection.
  void refuse(std::exception_ptr error) {
    std::deque<TaskPtr> tasks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = error;
      tasks.swap(tasks_);
    }
    for (auto& task : tasks) task->fail(error);
  }

 private:
  bool busy() const override { return !tasks_.empty(); }
  std::vector<TaskPtr> left() const override { return {tasks_.begin(), tasks_.end()}; }
  void forget() override { tasks_.clear(); }
  bool midway() const override { return false; }

  void step(Milliseconds slice, AllFinished& finished) override {
    TaskPtr task;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task = tasks_.front();
    }
    std::exception_ptr error;
    try {
      if (!issued_) comm_->check(task->issue(*api_, comm_->handle(), stream_), task->name);
      issued_ = true;
      ncclResult_t result = synchronize(slice);
      if (result == ncclInProgress) return;
      if (failed(result)) error = failure(result, task->name);
    } catch (...) {
      error = std::current_exception();
      std::lock_guard<std::mutex> lock(mutex_);
      if (error_) error = error_;
    }
    issued_ = false;
    finished.push_back({task, error});
    std::lock_guard<std::mutex> lock(mutex_);
    if (!tasks_.empty() && tasks_.front() == task) tasks_.pop_front();
  }

  std::deque<TaskPtr> tasks_;
  bool issued_ = false;  // the first task is issued; only for the thread that has the turn
};

inline std::string Task::missing() const {
  const CommPtr comm = runner ? runner->comm() : comm_;
  std::vector<int> ranks = comm ? comm->awaited() : std::vector<int>();
  // Without a connection the library does not know of a message.
  if (ranks.empty() && peer >= 0) ranks = {peer};
  if (ranks.empty()) return "";
  return c10::str(ranks.size() > 1 ? "; it waits for calls of ranks " : "; it waits for a call of rank ",
                  c10::Join(", ", ranks));
}

inline bool Task::advance(Milliseconds slice) {
  if (done()) return true;
  if (foreign()) C10_THROW_ERROR(DistBackendError, kOfTheParent);
  if (end_) return advance_event(slice);
  if (slice.count() == 0) {
    needs_this_thread() ? runner->help(*this, Milliseconds(1)) : hurry();
  } else if (runner) {
    runner->help(*this, slice);
  } else {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, slice, [this] { return done(); });
  }
  return done();
}

inline bool Task::await(Milliseconds slice) {
  if (end_ || needs_this_thread()) return advance(slice);
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, slice, [this] { return done(); });
}

inline void Task::hurry() {
  if (runner) runner->hurry();
}

inline bool Task::needs_this_thread() const { return runner && runner->is_this_thread(); }

}  // namespace pynccl
