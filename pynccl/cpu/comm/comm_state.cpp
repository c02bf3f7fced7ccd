#include "comm/comm_state.hpp"

namespace pncpu {

void CommState::ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void CommState::take_back_end() {
  std::lock_guard<std::mutex> lock(mutex_);
  ending_.store(End::None);
  changed_.notify_all();
}

bool CommState::await_end() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || ending() == End::None; });
  return ended_;
}

void CommState::set_pending(ncclResult_t state) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.store(state, std::memory_order_release);
  changed_.notify_all();
}

uint64_t CommState::begin_background() {
  answer_later();
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.store(ncclInProgress, std::memory_order_release);
  return ++background_;
}

void CommState::end_background(uint64_t ticket, ncclResult_t result) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ticket != background_) return;
  pending_.store(result, std::memory_order_release);
  changed_.notify_all();
}

ncclResult_t CommState::await_pending() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return pending_.load() != ncclInProgress; });
  return pending_.load();
}

ncclResult_t CommState::poll() {
  ncclResult_t r = pending();
  if (r == ncclInProgress) {
    int all = kAnswers;
    answers_.compare_exchange_strong(all, kAnswers - 1);
  }
  if (r != ncclSuccess) return r;
  int left = answers_.load();
  while (left > 0 && !answers_.compare_exchange_weak(left, left - 1)) {
  }
  return left == kAnswers ? ncclInProgress : ncclSuccess;
}

}  // namespace pncpu
