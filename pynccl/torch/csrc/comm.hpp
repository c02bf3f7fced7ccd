// A communicator and its end, and the attempt to connect its ranks.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "api.hpp"
#include "fork.hpp"
#include "stores.hpp"

namespace pynccl {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using c10::intrusive_ptr;

// Between two slices signals are handled; within one, the waiting thread works for the CPU library.
constexpr Milliseconds kSlice{100};

constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);

class Comm {
 public:
  // `members`: the ranks in the group, if they are not all of its ranks.
  Comm(ApiPtr api, ncclComm_t handle, Wording wording = nullptr, std::vector<int> members = {})
      : api_(std::move(api)), wording_(std::move(wording)), members_(std::move(members)), handle_(handle) {}
  Comm(const Comm&) = delete;
  ~Comm() {
    if (!home_.foreign()) end(true);
  }

  const Api& api() const { return *api_; }
  ncclComm_t handle() const { return handle_.load(); }

  // The asynchronous error. end() waits until this call has returned.
  ncclResult_t state() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!handle()) return ncclInvalidUsage;
    ncclResult_t state = ncclSuccess;
    ncclResult_t asked = api_->ncclCommGetAsyncError(handle(), &state);
    return failed(asked) ? asked : state;
  }

  // The text of the asynchronous error; empty: no error, or the communicator has ended.
  std::string trouble() const {
    std::lock_guard<std::mutex> lock(mutex_);
    ncclResult_t state = ncclSuccess;
    if (!handle() || failed(api_->ncclCommGetAsyncError(handle(), &state)) || !failed(state)) return "";
    return api_->describe(state, handle());
  }

  // Whether a rank has died or aborted; false if the communicator has ended.
  bool is_gone(int rank) const {
    std::lock_guard<std::mutex> lock(mutex_);
    int gone = 0;
    if (!handle() || !api_->pyncclCpuIsGone) return false;
    return !failed(api_->pyncclCpuIsGone(handle(), rank, &gone)) && gone;
  }

  // The ranks in the group for whose calls an operation waits, as far as the library tells.
  std::vector<int> awaited() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> ranks;
    if (!handle() || !api_->pyncclCpuIsAwaited) return ranks;
    int waits = 0;
    for (int rank = 0; !failed(api_->pyncclCpuIsAwaited(handle(), rank, &waits)); ++rank)
      if (waits) ranks.push_back(members_.empty() ? rank : members_[rank]);
    return ranks;
  }

  // For the end of a message: "; it waits for rank 1".
  std::string waits_for() const {
    const std::vector<int> ranks = awaited();
    if (ranks.empty()) return "";
    return c10::str("; it waits for rank", ranks.size() > 1 ? "s " : " ", c10::Join(", ", ranks));
  }

  // Waits for the result of a call in progress.
  ncclResult_t settle(ncclResult_t result, const std::function<bool()>& stopped = nullptr) const {
    for (auto pause = std::chrono::microseconds(1); result == ncclInProgress; pause *= 2) {
      if (stopped && stopped()) return ncclInProgress;
      result = state();
      if (result != ncclInProgress) break;
      pause = std::min<std::chrono::microseconds>(pause, std::chrono::milliseconds(1));
      std::this_thread::sleep_for(pause);
    }
    return result;
  }

  void check(ncclResult_t result, const std::string& what) const { check_settled(settle(result), what); }
  void check_settled(ncclResult_t result, const std::string& what) const {
    api_->check(result, what, handle(), wording_);
  }

  void end(bool abort) {
    ncclComm_t handle;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      handle = handle_.exchange(nullptr);
    }
    if (!handle) return;
    abort ? api_->ncclCommAbort(handle) : api_->ncclCommDestroy(handle);
  }

 private:
  Home home_;
  ApiPtr api_;
  const Wording wording_;
  const std::vector<int> members_;
  mutable std::mutex mutex_;
  std::atomic<ncclComm_t> handle_;
};

using CommPtr = std::shared_ptr<Comm>;

// Calls `look` in every slice, in a thread of its own, while the constructing thread is in a call of the
// library. What `look` throws interrupts that call, in the CPU library; NCCL cannot be interrupted there.
class Looking {
 public:
  Looking(ApiPtr api, std::function<void()> look) : api_(std::move(api)), caller_(int(syscall(SYS_gettid))) {
    if (look) thread_ = std::thread([this, look = std::move(look)] { run(look); });
  }
  ~Looking() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      if (error_) interrupt(0);
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  bool threw() {
    std::lock_guard<std::mutex> lock(mutex_);
    return bool(error_);
  }
  void rethrow() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void run(const std::function<void()>& look) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kSlice, [this] { return ended_; })) {
      lock.unlock();
      std::exception_ptr error;
      try {
        look();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (!error || ended_) continue;
      error_ = error;
      return interrupt(1);
    }
  }
  void interrupt(int on) const {
    if (api_->pyncclCpuInterrupt) api_->pyncclCpuInterrupt(caller_, on);
  }

  const ApiPtr api_;
  const int caller_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

// Connects a communicator in a separate thread. A caller whose wait times out leaves the attempt running and
// may wait for it again.
class Attempt : public std::enable_shared_from_this<Attempt> {
 public:
  using Connect = std::function<CommPtr(Attempt&)>;
  using Then = std::function<void(CommPtr, std::exception_ptr)>;

  static std::shared_ptr<Attempt> begin(ApiPtr api, Connect connect, Then then = nullptr) {
    auto attempt = std::make_shared<Attempt>(std::move(api));
    std::thread([attempt, connect = std::move(connect), then = std::move(then)] {
      attempt->run(connect, then);
    }).detach();
    return attempt;
  }
  explicit Attempt(ApiPtr api) : api_(std::move(api)) {}

  bool stopped() const { return stopped_.load(); }
  // No caller needs it any more.
  void stop() {
    stopped_.store(true);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_ && thread_ && api_->pyncclCpuInterrupt) api_->pyncclCpuInterrupt(thread_, 1);
  }

  bool wait(Milliseconds slice) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, slice, [this] { return done_; });
  }
  CommPtr result() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    return comm_;
  }

  // For `connect`.
  bool await(const OwnStore& store, const std::string& key, Milliseconds slice) const {
    return store.await(key, slice, [this] { return stopped(); });
  }
  CommPtr init(int size, ncclUniqueId id, int rank, const Wording& wording = nullptr,
               const std::vector<int>& members = {}, std::function<void()> look = nullptr) const {
    if (stopped()) return nullptr;
    Looking looking(api_, std::move(look));
    ncclComm_t handle = nullptr;
    ncclResult_t result = api_->ncclCommInitRank(&handle, size, id, rank);
    if (failed(result)) looking.rethrow();
    api_->check(result, "ncclCommInitRank", handle, wording);
    auto comm = std::make_shared<Comm>(api_, handle, wording, members);
    result = comm->settle(result, [&] { return stopped() || looking.threw(); });
    if (result != ncclSuccess) looking.rethrow();
    comm->check_settled(result, "ncclCommInitRank");
    return comm;
  }

 private:
  void run(const Connect& connect, const Then& then) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      thread_ = int(syscall(SYS_gettid));
    }
    CommPtr comm;
    std::exception_ptr error;
    try {
      comm = connect(*this);
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // The thread id may be reused by another thread.
      if (stopped() && api_->pyncclCpuInterrupt) api_->pyncclCpuInterrupt(thread_, 0);
      comm_ = comm, error_ = error, done_ = true;
    }
    changed_.notify_all();
    if (then) then(comm, error);
  }

  ApiPtr api_;
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  int thread_ = 0;
  bool done_ = false;
  CommPtr comm_;
  std::exception_ptr error_;
};

}  // namespace pynccl
