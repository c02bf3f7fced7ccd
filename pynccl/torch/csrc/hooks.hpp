// What others want to know of a group: that an operation has completed, and that the group fails. torch's
// flight recorder asks for both since torch 2.15.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace pynccl {

class Hooks {
 public:
  using Abort = std::function<void()>;
  using Completed = std::function<void(uint64_t)>;

  void add(int64_t id, Abort hook) { set(aborts_, id, std::move(hook)); }
  void add_completed(int64_t id, Completed hook) { set(completed_, id, std::move(hook)); }
  void remove(int64_t id) { set(aborts_, id, Abort()); }
  void remove_completed(int64_t id) { set(completed_, id, Completed()); }

  bool wants_completions() const { return completions_.load(); }
  // The callers hold no lock: hooks may take the GIL.
  void failing() const { call(aborts_); }
  void completed(uint64_t key) const { call(completed_, key); }

 private:
  // The caller destroys the old hook, without the lock: that may need the GIL.
  template <class Hook>
  void set(std::map<int64_t, Hook>& hooks, int64_t id, Hook hook) {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks[id].swap(hook);
    if (!hooks[id]) hooks.erase(id);
    completions_.store(!completed_.empty());
  }

  template <class Hook, class... Args>
  void call(const std::map<int64_t, Hook>& hooks, Args... args) const {
    std::vector<Hook> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [id, hook] : hooks) all.push_back(hook);
    }
    for (auto& hook : all) {
      try {
        hook(args...);
      } catch (...) {  // the operation's own error matters more
      }
    }
  }

  mutable std::mutex mutex_;
  std::map<int64_t, Abort> aborts_;
  std::map<int64_t, Completed> completed_;
  std::atomic<bool> completions_{false};
};

// One Work, which completes with the last of its tasks; a failed task never counts.
class Completion {
 public:
  Completion(std::shared_ptr<const Hooks> hooks, uint64_t key, size_t tasks)
      : hooks_(std::move(hooks)), key_(key), left_(tasks) {}
  void count() {
    if (--left_ == 0) hooks_->completed(key_);
  }

 private:
  const std::shared_ptr<const Hooks> hooks_;
  const uint64_t key_;
  std::atomic<size_t> left_;
};

}  // namespace pynccl
