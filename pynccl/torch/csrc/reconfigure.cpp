// A group that gets new members: torch 2.15's fault tolerance.
#include "backend.hpp"

#ifdef PYNCCL_HAS_RECONFIGURE

namespace pynccl {

namespace {

std::vector<std::string> in_order(const c10d::ReconfigureOptions& options) {
  return std::visit(
      [](const auto& given) {
        std::vector<std::string> handles(given.begin(), given.end());
        // Every member chooses the same order of a set.
        if constexpr (!std::is_same_v<decltype(given), const std::vector<std::string>&>)
          std::sort(handles.begin(), handles.end());
        return handles;
      },
      options.handles);
}

}  // namespace

Served Backend::served() const {
  {
    std::lock_guard<std::mutex> lock(served_mutex_);
    if (served_.store) return served_;
  }
  // Without the lock: it takes the GIL.
  Served made = serve();
  std::lock_guard<std::mutex> lock(served_mutex_);
  if (!served_.store) served_ = std::move(made);
  return served_;
}

// The members meet while the previous group still works: if one does not come, nothing has changed.
WorkPtr Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  const WithoutGil released;
  std::unique_lock<std::mutex> alone(reconfiguring_, std::try_to_lock);
  TORCH_CHECK(alone, "reconfigure: another thread reconfigures this group");
  auto lock = entered();
  if (final_.load()) std::rethrow_exception(shut_down());
  TORCH_CHECK(!coalesced_, "reconfigure cannot be coalesced");
  const Milliseconds limit = std::min(options.timeout.value_or(options_->timeout), kLongest);
  TORCH_CHECK_VALUE(limit.count() > 0, "timeout is ", limit.count(), "ms, expected more than 0");
  TORCH_CHECK_VALUE(options.hints.empty(), "hints has ", options.hints.size(), " entries, expected none");
  TORCH_CHECK_VALUE(!uuids_.count(options.uuid), "uuid is ", options.uuid,
                    ", which was already used for this group; expected a new one");
  lock.unlock();
  const auto deadline = Clock::now() + limit;
  const Joined joined =
      join(served(), options.uuid, in_order(options), limit, pg_uid_.empty() ? named_.name : pg_uid_);
  uuids_.insert(options.uuid);
  renew(joined);
  try {
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
    std::optional<c10::Device> device = bound_device_id_;
    if (cpu_only_) device = at::kCPU;
    if (device) connected(*device, -1, std::max(left, Milliseconds(1)));
  } catch (...) {
    const auto error = std::current_exception();
    leave_members();
    std::rethrow_exception(error);
  }
  auto done = std::make_shared<Task>();
  done->succeed();
  return c10::make_intrusive<WorkPynccl>(rank_, OpType::UNKNOWN, "pynccl:reconfigure",
                                         std::vector<TaskPtr>{done}, sequence_,
                                         std::make_shared<const std::string>(here()), hooks_);
}

// Ends the communicators; peers may still read what completed operations have sent.
void Backend::leave_members() {
  bool abort = !unfinished().empty();
  for (auto& lane : all_lanes()) abort |= lane->attempt || (lane->comm && failed(lane->comm->state()));
  try {
    end(abort);
  } catch (const std::exception&) {  // it took too long: the communicators are left to their threads
  }
}

void Backend::renew(const Joined& joined) {
  leave_members();
  // Another thread may have begun to end them.
  while (!released_.load()) std::this_thread::sleep_for(Milliseconds(1));
  std::shared_ptr<Messages> messages;  // destroyed without the lock
  auto lock = entered();
  if (final_.load()) std::rethrow_exception(shut_down());
  messages.swap(messages_);
  store_ = joined.store, stores_.emplace(store_), rank_ = joined.rank, size_ = joined.size;
  named_.ranks.clear();
  here_ = nullptr;
  sequence_ = monitored_ = meetings_ = 0;
  split_store_ = nullptr, split_ranks_.clear(), split_counts_.clear();
  ++groups_;
  released_.store(false);
  ended_.store(false);
}

}  // namespace pynccl

#endif
