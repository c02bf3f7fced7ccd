// Put, Signal and WaitSignal of one batch: in order to each peer, concurrently for all peers.
//
// A put writes the peer's window: by stores where it is mapped, through the kernel where direct access works,
// else by frames that the peer's service thread writes. Every pair of ranks has a counter for each signal.
// The sender increments it after its data: in shared memory, or by the last frame.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "ops/context.hpp"

namespace pncpu {

// The end of a put or signal at the peer.
struct Target {
  uint64_t window = 0;   // its number
  uint64_t offset = 0;   // into the window
  uint64_t address = 0;  // in the peer's process
  char* mapped = nullptr;
};

struct Awaited {
  int peer = 0;
  uint32_t signal = 0;
  uint64_t count = 0;
  uint64_t until = 0;  // all that this rank has awaited from the peer, these included
};

// What the Op of a one-sided call needs beyond its buffer.
struct OneSidedCall {
  Target target;
  uint32_t signal = 0;
  std::vector<Awaited> waits;
  std::shared_ptr<const void> keeps;  // the window, mapped as long as a call needs it
};

// The body of Ctl::Put; the data follow.
struct PutHead {
  uint64_t window = 0, offset = 0;
  uint32_t signal = 0;
  uint8_t puts = 0, signals = 0;  // whether it has data, and whether it is the last of its call
  uint8_t pad[2] = {};
};

class OneSided {
 public:
  explicit OneSided(const Context& context) : context_(context) {}
  // Before signals can arrive; `signals` is the number that each pair of ranks has.
  void open(int nranks, int signals);
  void start(const std::vector<Op>& ops);
  Step step();
  bool done() const { return left_ == 0; }
  // A frame of the peer incremented a signal. Called by the service's thread.
  void arrived(int peer, uint32_t signal) { heard(peer, signal).fetch_add(1, std::memory_order_release); }
  // How many have arrived that no wait has taken; for any thread.
  uint64_t pending(int peer, uint32_t signal) const;
  // What the batch still waits for; only for the thread that runs it.
  std::vector<Awaited> awaited() const;
  std::vector<int> targets() const;  // peers that puts and signals have not reached
  std::string str() const;

 private:
  struct Lane {
    std::vector<const Op*> ops;
    size_t at = 0, done = 0;  // bytes of ops[at]
    bool framed = false;      // frames were sent to this peer: signals must not overtake them
    bool idle() const { return at == ops.size(); }
    const Op& op() const { return *ops[at]; }
  };
  struct Waiting {
    const OneSidedCall* call;
    size_t at;  // the first that has not been consumed
  };
  Step step_lane(int peer, Lane& lane);
  Step put(int peer, Lane& lane);
  Step put_frames(int peer, Lane& lane);
  bool signal(int peer, Lane& lane);
  bool step_wait(Waiting& waiting);
  uint64_t counted(int peer, uint32_t signal) const;
  size_t place(int peer, uint32_t signal) const { return size_t(peer) * size_t(signals_) + signal; }
  std::atomic<uint64_t>& heard(int peer, uint32_t signal) const { return heard_[place(peer, signal)]; }
  const Context& context_;
  int signals_ = 0;
  std::unique_ptr<std::atomic<uint64_t>[]> heard_;  // by frames, or from this rank itself
  std::unique_ptr<std::atomic<uint64_t>[]> taken_;  // of each peer's signals, by waits
  std::vector<Lane> lanes_;
  std::vector<Waiting> waits_;
  size_t left_ = 0;
};

}  // namespace pncpu
