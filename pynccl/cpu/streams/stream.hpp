// Streams: queues whose work runs in order, by the thread that waits for it or else by the stream's own.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/handles.hpp"
#include "streams/event.hpp"
#include "streams/waiting.hpp"

namespace pncpu {

class Domain;
class Stream;

// What a stream runs. A task that several streams share runs when all have come to it, by whoever drives the
// last that came.
class Task {
 public:
  virtual ~Task() = default;
  // A stream has come to it. True for the last one, which runs it.
  virtual bool come() = 0;
  // Until done or the deadline (ncclInProgress); wait() is for the streams that do not run it.
  virtual ncclResult_t run(Deadline deadline) = 0;
  virtual ncclResult_t wait(Deadline deadline) = 0;
  using Errors = std::vector<std::pair<uint64_t, ncclResult_t>>;  // by communicators' serials
  virtual Errors errors() const = 0;
};

struct Node {
  enum Kind { Run, Record, Wait, After } kind = Run;
  std::shared_ptr<Task> task;
  std::shared_ptr<Recording> recording;
  std::shared_ptr<Stream> stream;  // After: its first `number` nodes come first
  uint64_t number = 0;
  bool came = false, leads = false;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // The stream ends when its last owner has let go of it and its work is done.
  // An attended one has no thread: its work is run by those who wait for it.
  static std::shared_ptr<Stream> make(Domain& domain, bool blocking, bool attended = false);
  Stream(Domain& domain, bool blocking, bool attended)
      : domain_(domain), blocking_(blocking), attended_(attended) {}

  // Work is queued in two steps under the issue lock, so that a group is queued whole or not at all: what may
  // run out of memory or threads comes first.
  using Nodes = std::list<Node>;
  Nodes nodes_for(Node node);
  void push(Nodes nodes) noexcept;
  // Under the issue lock: nothing is pushed any more.
  void end() { ended_ = true; }
  bool ended() const { return ended_; }
  // In CUDA's sense: its work and the legacy stream's wait for each other.
  bool blocking() const { return blocking_; }
  bool attended() const { return attended_; }
  std::shared_ptr<Domain> keeps;  // of a stream that a caller created

  bool idle() const { return completed_.load() == enqueued_.load(); }
  uint64_t enqueued() const { return enqueued_.load(); }
  uint64_t completed() const { return completed_.load(); }
  // What its oldest work is: a task, or the wait for another stream.
  struct Head {
    std::shared_ptr<Task> task;
    std::shared_ptr<Stream> waits_for;
  };
  Head head();
  // Runs or waits until `target` nodes have completed; ncclInProgress at the deadline.
  ncclResult_t drive(uint64_t target, Deadline deadline);
  // Waits for all there is now, then take_error().
  ncclResult_t synchronize(Deadline deadline, uint64_t comm_serial);
  // What a communicator's work on this stream ended in since this was last asked; anyone's with kAnyone.
  ncclResult_t take_error(uint64_t comm_serial);
  static constexpr uint64_t kAnyone = 0;

 private:
  ncclResult_t run(Node& node, Deadline deadline);
  ncclResult_t run_task(Node& node, Deadline deadline);
  void start_worker();
  void work();
  void close();
  void note_errors(const Task& task);
  Domain& domain_;  // lives as long as anybody can push
  const bool blocking_, attended_;
  bool ended_ = false;
  std::mutex queue_mutex_, running_;
  Nodes queue_;
  std::atomic<uint64_t> enqueued_{0}, completed_{0};
  std::atomic<bool> failed_{false};
  std::map<uint64_t, ncclResult_t> errors_;  // by the communicator's serial; under queue_mutex_
  Doorbell arrivals_, completions_, stopping_;
  std::atomic<bool> stop_{false};
  bool working_ = false;
};

// Until the event has happened; ncclInProgress at the deadline.
ncclResult_t await(Recording& recording, Deadline deadline);

template <>
struct HandleTraits<Stream> {
  static constexpr HandleKind kind = HandleKind::Stream;
  static constexpr char name[] = "stream", maker[] = "pyncclCpuStreamCreate";
};
template <>
struct HandleTraits<Event> {
  static constexpr HandleKind kind = HandleKind::Event;
  static constexpr char name[] = "event", maker[] = "pyncclCpuEventCreate";
};

}  // namespace pncpu
