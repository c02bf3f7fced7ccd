// Streams: queues of work in order. A thread that waits for the work runs it; otherwise the stream's own
// thread does.
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

// The work of a stream. A task of several streams runs when all of them have reached it; the thread that
// drives the last stream runs it.
class Task {
 public:
  virtual ~Task() = default;
  // A stream has reached the task. True for the last stream, which runs it.
  virtual bool come() = 0;
  // Both return at the end of the task or at the deadline (ncclInProgress). A stream that does not run the
  // task waits for it.
  virtual ncclResult_t run(Deadline deadline) = 0;
  virtual ncclResult_t wait(Deadline deadline) = 0;
  using Errors = std::vector<std::pair<uint64_t, ncclResult_t>>;  // by communicators' serials
  virtual Errors errors() const = 0;
};

struct Node {
  enum Kind { Run, Record, Wait, After } kind = Run;
  std::shared_ptr<Task> task;
  std::shared_ptr<Recording> recording;
  std::shared_ptr<Stream> stream;  // After: its first `number` nodes must complete before
  uint64_t number = 0;
  bool came = false, leads = false;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // The stream ends when its last owner has released it and its work is complete.
  // An attended stream has no thread: the threads that wait for its work run it.
  static std::shared_ptr<Stream> make(Domain& domain, bool blocking, bool attended = false);
  Stream(Domain& domain, bool blocking, bool attended)
      : domain_(domain), blocking_(blocking), attended_(attended) {}

  // Work is queued in two steps under the issue lock, so that a group is queued completely or not at all.
  // Only the first step can run out of memory or threads.
  using Nodes = std::list<Node>;
  Nodes nodes_for(Node node);
  void push(Nodes nodes) noexcept;
  // Under the issue lock: no more work is pushed.
  void end() { ended_ = true; }
  bool ended() const { return ended_; }
  // In CUDA's sense: it synchronizes with the legacy stream.
  bool blocking() const { return blocking_; }
  bool attended() const { return attended_; }
  std::shared_ptr<Domain> keeps;  // of a stream that a caller created

  bool idle() const { return completed_.load() == enqueued_.load(); }
  uint64_t enqueued() const { return enqueued_.load(); }
  uint64_t completed() const { return completed_.load(); }
  // The oldest work: a task, or a wait for another stream.
  struct Head {
    std::shared_ptr<Task> task;
    std::shared_ptr<Stream> waits_for;
  };
  Head head();
  // Runs or waits until `target` nodes have completed; ncclInProgress at the deadline.
  ncclResult_t drive(uint64_t target, Deadline deadline);
  // Waits for all current work, then returns take_error().
  ncclResult_t synchronize(Deadline deadline, uint64_t comm_serial);
  // Returns and clears the error of a communicator's work on this stream; kAnyone: of any communicator.
  ncclResult_t take_error(uint64_t comm_serial);
  // No caller will run the work: the stream's thread starts with it immediately.
  void hurry() { stopping_.ring(); }
  static constexpr uint64_t kAnyone = 0;

 private:
  ncclResult_t run(Node& node, Deadline deadline);
  ncclResult_t run_task(Node& node, Deadline deadline);
  void start_worker();
  void work();
  bool is_driven();  // a thread runs the work, or waits in it for other ranks
  void close();
  struct Error {
    ncclResult_t result;
    bool taken;
  };
  using Errors = std::map<uint64_t, Error>;  // by the communicator's serial
  static bool is_untaken(const Errors::value_type& one) { return !one.second.taken; }
  Errors::iterator find_error(uint64_t comm_serial);
  void note_errors(const Task& task);
  void note_error(uint64_t serial, ncclResult_t result);
  // The error of a communicator's work, of any communicator's for kAnyone, and whose it is.
  std::pair<ncclResult_t, uint64_t> error_of(uint64_t comm_serial);
  Domain& domain_;  // lives while work can be pushed
  const bool blocking_, attended_;
  bool ended_ = false;
  std::mutex queue_mutex_, running_;
  Nodes queue_;
  std::atomic<uint64_t> enqueued_{0}, completed_{0};
  std::atomic<bool> failed_{false};
  Errors errors_;  // under queue_mutex_
  alignas(kCacheLine) Doorbell arrivals_, completions_, stopping_;
  std::atomic<bool> stop_{false};
  bool working_ = false;
};

// Waits until the event has happened, and returns its result; ncclInProgress at the deadline.
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
