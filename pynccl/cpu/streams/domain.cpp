#include "streams/domain.hpp"

#include <algorithm>
#include <tuple>

#include "base/device.hpp"

namespace pncpu {
namespace {

struct Domains {
  using Key = std::tuple<std::thread::id, int, int>;
  std::mutex mutex;
  std::map<Key, std::weak_ptr<Domain>> by_key;
  size_t prune_at = 64;
};

// Keeps the devices that this thread used last, so that successive communicators share their streams.
class Held {
 public:
  ~Held() { abandon(); }
  void hold(std::shared_ptr<Domain> domain) {
    abandon();
    if (domains_.size() == kMost) domains_.erase(domains_.begin());
    domains_.push_back(std::move(domain));
  }

 private:
  // A forked child never touches its parent's devices.
  void abandon() {
    if (epoch_ == process_epoch()) return;
    new std::vector<std::shared_ptr<Domain>>(std::move(domains_));
    domains_.clear();
    epoch_ = process_epoch();
  }
  static constexpr size_t kMost = 4;
  std::vector<std::shared_ptr<Domain>> domains_;
  uint32_t epoch_ = process_epoch();
};
thread_local Held t_held;

}  // namespace

Domain::Domain() : legacy_(Stream::make(*this, true)) {}

std::shared_ptr<Domain> Domain::of(int device, int copy) {
  Domains& all = per_process<Domains>();
  bool shared = shared_devices() != 0;
  Domains::Key key{shared ? std::thread::id() : std::this_thread::get_id(), device, shared ? 0 : copy};
  std::lock_guard<std::mutex> lock(all.mutex);
  if (auto it = all.by_key.find(key); it != all.by_key.end())
    if (std::shared_ptr<Domain> known = it->second.lock()) return known;
  auto fresh = std::make_shared<Domain>();
  all.by_key[key] = fresh;
  if (all.by_key.size() > all.prune_at) {
    for (auto it = all.by_key.begin(); it != all.by_key.end();)
      it = it->second.expired() ? all.by_key.erase(it) : std::next(it);
    all.prune_at = 2 * all.by_key.size() + 64;
  }
  t_held.hold(fresh);
  return fresh;
}

// Forgets idle streams, since threads that have ended leave theirs here. A living thread gets a new stream if
// needed.
void Domain::forget_idle_threads() {
  for (auto it = per_thread_.begin(); it != per_thread_.end();)
    it = it->second.use_count() == 1 && it->second->idle() ? per_thread_.erase(it) : std::next(it);
}

std::shared_ptr<Stream> Domain::per_thread() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = per_thread_.find(std::this_thread::get_id());
  if (it != per_thread_.end()) return it->second;
  if (per_thread_.size() >= 16) forget_idle_threads();
  return per_thread_[std::this_thread::get_id()] = Stream::make(*this, true);
}

std::shared_ptr<Stream> Domain::create(bool blocking, bool attended) {
  std::shared_ptr<Stream> stream = Stream::make(*this, blocking, attended);
  stream->keeps = shared_from_this();
  if (!blocking) return stream;
  std::lock_guard<std::mutex> lock(mutex_);
  if (created_.size() >= prune_at_) {
    auto gone = [](const std::weak_ptr<Stream>& s) { return s.expired(); };
    created_.erase(std::remove_if(created_.begin(), created_.end(), gone), created_.end());
    prune_at_ = 2 * created_.size() + 16;
  }
  created_.push_back(stream);
  return stream;
}

std::vector<std::shared_ptr<Stream>> Domain::come_before(const Stream& stream) {
  std::vector<std::shared_ptr<Stream>> busy;
  if (!stream.blocking()) return busy;
  if (&stream != legacy_.get()) {
    if (!legacy_->idle()) busy.push_back(legacy_);
    return busy;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [thread, other] : per_thread_)
    if (!other->idle()) busy.push_back(other);
  size_t kept = 0;
  for (std::weak_ptr<Stream>& created : created_)
    if (std::shared_ptr<Stream> other = created.lock()) {
      if (!other->idle()) busy.push_back(other);
      created_[kept++] = created;
    }
  created_.resize(kept);
  return busy;
}

}  // namespace pncpu
