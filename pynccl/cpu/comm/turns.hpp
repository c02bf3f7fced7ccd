// The calls on a communicator run one after another, in the order of their tickets, whatever their streams.
// All ranks issue in the same order, so all ranks run the same collective at the same time.
#pragma once

#include <atomic>
#include <cstdint>

namespace pncpu {

class Turns {
 public:
  uint64_t take() { return next_.fetch_add(1); }
  bool is_turn_of(uint64_t ticket) const { return serving_.load(std::memory_order_acquire) == ticket; }
  void end(uint64_t ticket) { serving_.store(ticket + 1, std::memory_order_release); }
  uint64_t serving() const { return serving_.load(std::memory_order_acquire); }
  uint64_t next() const { return next_.load(std::memory_order_acquire); }
  bool idle() const { return serving_.load() == next_.load(); }

 private:
  std::atomic<uint64_t> next_{0}, serving_{0};
};

}  // namespace pncpu
