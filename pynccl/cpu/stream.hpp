// Streams: queues whose work runs in order, by the thread that waits for it or else by the stream's own.
#pragma once

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "core.hpp"
#include "ops.hpp"

namespace pncpu {

struct Batch;

// What one group issued on streams that it ties together. Runs when every one of these streams has come to
// it.
struct Launch {
  std::vector<Batch> batches;
  std::atomic<int> streams_to_come{1};
  std::atomic<bool> done{false};
  ncclResult_t result = ncclSuccess;
  // Until done or the deadline (ncclInProgress).
  ncclResult_t run(Deadline deadline);
  ~Launch();

 private:
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
  // Runs or waits until `target` nodes have completed. ncclInProgress at the deadline; otherwise what the
  // stream's work ended in since this was last asked.
  ncclResult_t drive(uint64_t target, Deadline deadline);
  ncclResult_t synchronize(Deadline deadline);
  ncclResult_t take_error() { return error_.exchange(ncclSuccess); }

 private:
  ncclResult_t run(Node& node, Deadline deadline);
  void work();
  std::mutex queue_mutex_, running_;
  std::deque<Node> queue_;
  std::atomic<uint64_t> enqueued_{0}, completed_{0};
  std::atomic<ncclResult_t> error_{ncclSuccess};
  Doorbell arrivals_, completions_;
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
