// Streams: queues whose work runs in order, by the thread that waits for it or else by the stream's own.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "base/core.hpp"
#include "ops/ops.hpp"

namespace pncpu {

struct Batch;

// What one group issued on streams that it ties together. Runs when every one of these streams has come to
// it.
struct Launch {
  std::vector<Batch> batches;
  std::atomic<int> streams_to_come{1};
  std::atomic<bool> done{false};
  // Until done or the deadline (ncclInProgress). What became of it stands in the batches.
  ncclResult_t run(Deadline deadline);
  ~Launch();

 private:
  bool spin_for_news(const std::vector<uint32_t>& seen);
  void wait_for_news(const std::vector<uint32_t>& seen, int64_t ns);
  void when_blocked(Clock::time_point since, double* next_look);
};

struct Event {
  std::mutex mutex;
  std::atomic<uint64_t> recorded{0}, happened{0};
  Doorbell bell;
};

struct Node {
  enum Kind { Run, Record, Wait } kind = Run;
  std::shared_ptr<Launch> launch;
  std::shared_ptr<Event> event;
  uint64_t number = 0;
  bool came = false;
};

class Stream {
 public:
  Stream();
  ~Stream();
  void push(Node node);
  bool idle() const { return completed_.load() == enqueued_.load(); }
  uint64_t enqueued() const { return enqueued_.load(); }
  // Runs or waits until `target` nodes have completed; ncclInProgress at the deadline.
  ncclResult_t drive(uint64_t target, Deadline deadline);
  // Waits for all there is now, then take_error().
  ncclResult_t synchronize(Deadline deadline, uint64_t comm_serial);
  // What a communicator's work on this stream ended in since this was last asked; anyone's with kAnyone.
  ncclResult_t take_error(uint64_t comm_serial);
  static constexpr uint64_t kAnyone = 0;

 private:
  ncclResult_t run(Node& node, Deadline deadline);
  void work();
  void note_errors(const Launch& launch);
  std::mutex queue_mutex_, running_;
  std::deque<Node> queue_;
  std::atomic<uint64_t> enqueued_{0}, completed_{0};
  std::atomic<bool> failed_{false};
  std::map<uint64_t, ncclResult_t> errors_;  // by the communicator's serial; under queue_mutex_
  Doorbell arrivals_, completions_, stopping_;
  std::atomic<bool> stop_{false};
  std::thread worker_;
};

// Handles 0, 1 and 2 are the communicator's default stream; others must come from pyncclCpuStreamCreate.
// nullptr after fail() for an unknown handle.
std::shared_ptr<Stream> find_stream(Comm* comm, cudaStream_t handle, const char* function);

// The default stream of a device of the calling thread. Ranks of one communicator that a thread creates on
// the same device index are told apart by `copy`.
std::shared_ptr<Stream> default_stream(int device, int copy);

// Issues what one group recorded.
ncclResult_t issue(std::vector<Op> ops);
ncclResult_t issue_one(const Op& op);

}  // namespace pncpu
