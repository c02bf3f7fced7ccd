// The connections to a group's store for those that wait in it: a wait on the group's own connection would
// block its other users. A new connection to a TCPStore may take seconds, since both ends ask for the name of
// the other's address, and the server does nothing else meanwhile. So all groups of a process share two.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "store_server.hpp"

namespace pynccl {

// Between two looks whether a store's server listens. Each is a connection, for whose name torch's server
// asks, while all others wait.
constexpr std::chrono::seconds kLookAtServer{3};

namespace detail {

// Stores have it since torch 2.8; a store written in Python may not implement it.
template <class Store>
auto clone(Store& store, int) -> decltype(store.clone()) {
  try {
    return store.clone();
  } catch (const std::exception&) {
    return nullptr;
  }
}
template <class Store>
c10::intrusive_ptr<c10d::Store> clone(Store&, long) {
  return nullptr;
}

struct Prefix : c10d::PrefixStore {
  static const std::string& of(const c10d::PrefixStore& store) { return store.*&Prefix::prefix_; }
};

inline c10::intrusive_ptr<c10d::Store> base_of(c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingStore();
  return store;
}

// The same keys over another connection.
inline c10::intrusive_ptr<c10d::Store> rebased(const c10::intrusive_ptr<c10d::Store>& store,
                                               const c10::intrusive_ptr<c10d::Store>& base) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (!prefixed) return base;
  return c10::make_intrusive<c10d::PrefixStore>(Prefix::of(*prefixed),
                                                rebased(prefixed->getUnderlyingStore(), base));
}

// Those to one store, made when they are first needed: one on which a user at a time may wait, and one for
// the short requests of all others. The first becomes the second if nobody waits on it then.
class Connections : public std::enable_shared_from_this<Connections> {
 public:
  using Store = c10::intrusive_ptr<c10d::Store>;
  using Lease = std::shared_ptr<void>;

  explicit Connections(Store base) : base_(std::move(base)) {}

  static std::shared_ptr<Connections> to(const Store& base) {
    static auto& all = *new std::map<c10d::Store*, std::weak_ptr<Connections>>;
    static auto& mutex = *new std::mutex;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = all.begin(); it != all.end();) it = it->second.expired() ? all.erase(it) : std::next(it);
    auto& found = all[base.get()];
    auto connections = found.lock();
    if (!connections) found = connections = std::make_shared<Connections>(base);
    return connections;
  }

  // The right to wait; nullptr: another user has it.
  Lease lease() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(leased_, true)) return nullptr;
    return {this, [self = shared_from_this()](Connections*) {
              std::lock_guard<std::mutex> lock(self->mutex_);
              self->leased_ = false;
            }};
  }

  // For the user with the lease. nullptr: the store has no other connections.
  Store to_wait_on() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (to_wait_on_) return to_wait_on_;
    }
    Store made = clone(*base_, 0);
    std::lock_guard<std::mutex> lock(mutex_);
    return to_wait_on_ = made;
  }

  // For short requests; nullptr as above.
  Store for_all() {
    std::lock_guard<std::mutex> one(making_);
    if (Store found = made_for_all()) return found;
    Store made = clone(*base_, 0);
    std::lock_guard<std::mutex> lock(mutex_);
    return for_all_ = made;
  }
  Store made_for_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!for_all_ && !leased_) for_all_ = std::exchange(to_wait_on_, nullptr);
    return for_all_;
  }

  std::string ended(std::chrono::steady_clock::duration pause) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      if (looked_ && now - *looked_ < pause) return ended_;
      looked_ = now;
    }
    const std::string found = ended_server(base_);
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_ = found;
  }

 private:
  const Store base_;
  std::mutex mutex_, making_;
  Store to_wait_on_, for_all_;
  bool leased_ = false;
  std::optional<std::chrono::steady_clock::time_point> looked_;
  std::string ended_;
};

}  // namespace detail

// A group's keys over one of the connections.
class OwnStore {
 public:
  // `lease`: this user may wait on the connection.
  OwnStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<void> lease)
      : store_(std::move(store)), lease_(std::move(lease)) {}
  c10d::Store* operator->() const { return store_.get(); }
  c10d::Store& operator*() const { return *store_; }

  // Waits until the key exists or `stopped`. torch logs every slice that times out.
  bool await(const std::string& key, std::chrono::milliseconds slice,
             const std::function<bool()>& stopped) const {
    using std::chrono::microseconds;
    const auto began = std::chrono::steady_clock::now();
    for (microseconds pause(50); !stopped(); pause *= 2) {
      if (lease_) {
        try {
          store_->wait({key}, slice);
          return !stopped();
        } catch (const std::exception&) {
          // A time-out has no type of its own. If the store is gone, check() below throws again.
        }
      }
      if (store_->check({key})) return !stopped();
      if (lease_) continue;
      // Many may wait so, for long.
      const auto waited = std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - began);
      pause = std::min(pause, std::clamp(waited / 16, microseconds(10'000), microseconds(200'000)));
      std::this_thread::sleep_for(pause);
    }
    return false;
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<void> lease_;
};
using StorePtr = std::shared_ptr<const OwnStore>;

// The connections last as long as one of these.
class Stores {
 public:
  explicit Stores(c10::intrusive_ptr<c10d::Store> group)
      : group_(std::move(group)), connections_(detail::Connections::to(detail::base_of(group_))) {}
  const c10::intrusive_ptr<c10d::Store>& group() const { return group_; }

  // For one user that waits: one can wait on a connection; others ask for the key again and again.
  StorePtr take() const {
    auto lease = connections_->lease();
    return lease ? over(connections_->to_wait_on(), lease) : common();
  }
  // For short requests.
  StorePtr common() const { return over(connections_->for_all(), nullptr); }
  // nullptr: the connection is still to be made.
  StorePtr made_common() const {
    auto base = connections_->made_for_all();
    return base ? over(base, nullptr) : nullptr;
  }
  // HOST:PORT of the server if it has ended; empty: it listens, or nothing is known. The answer may be as old
  // as `pause`.
  std::string ended(std::chrono::steady_clock::duration pause = kLookAtServer) const {
    return connections_->ended(pause);
  }
  // For one user that waits as long as the group lives.
  StorePtr another() const {
    auto own = detail::clone(*group_, 0);
    return own ? std::make_shared<const OwnStore>(own, connections_) : common();
  }

  // Ends a wait of this process for a key, in the background.
  void wake(const std::string& key) const {
    std::thread([self = *this, key] {
      try {
        (*self.common())->set(key, std::vector<uint8_t>());
      } catch (...) {  // the store is gone, and with it the waits
      }
    }).detach();
  }

 private:
  StorePtr over(c10::intrusive_ptr<c10d::Store> base, std::shared_ptr<void> lease) const {
    if (!base) return std::make_shared<const OwnStore>(group_, nullptr);
    return std::make_shared<const OwnStore>(detail::rebased(group_, base), std::move(lease));
  }

  c10::intrusive_ptr<c10d::Store> group_;
  std::shared_ptr<detail::Connections> connections_;
};

}  // namespace pynccl
