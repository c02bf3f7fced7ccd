#include "streams/stream.hpp"

#include <algorithm>

#include "base/threads.hpp"
#include "streams/domain.hpp"

namespace pncpu {
namespace {

// How long the stream's thread leaves new work to a caller that waits; grows if callers do.
constexpr int64_t kLeastGraceNs = 100 * 1000, kMostGraceNs = 2000 * 1000;
constexpr int kIdleTicks = 20;
constexpr size_t kMostErrors = 64;

}  // namespace

std::shared_ptr<Stream> Stream::make(Domain& domain, bool blocking, bool attended) {
  auto stream = std::make_shared<Stream>(domain, blocking, attended);
  // The stream's thread holds a reference of its own and ends after the other owners.
  return std::shared_ptr<Stream>(stream.get(), [stream](Stream*) mutable {
    stream->close();
    stream.reset();  // a weak_ptr keeps this deleter alive, and with it the stream
  });
}

void Stream::close() {
  stop_.store(true);
  arrivals_.ring();
  stopping_.ring();
  if (!attended_ || idle()) return;
  try {
    start_worker();                  // no thread can wait for the work any more
  } catch (const std::exception&) {  // no thread: the remaining work is not run
  }
}

void Stream::start_worker() {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  if (!working_) start_thread("a stream", [self = shared_from_this()] { self->work(); });
  working_ = true;
}

Stream::Nodes Stream::nodes_for(Node node) {
  if (!attended_) start_worker();
  Nodes nodes;
  for (std::shared_ptr<Stream>& other : domain_.come_before(*this)) {
    nodes.emplace_back();
    nodes.back().kind = Node::After;
    nodes.back().number = other->enqueued();
    nodes.back().stream = std::move(other);
  }
  nodes.push_back(std::move(node));
  return nodes;
}

void Stream::push(Nodes nodes) noexcept {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    enqueued_.fetch_add(nodes.size());
    queue_.splice(queue_.end(), nodes);
  }
  arrivals_.ring();
}

ncclResult_t await(Recording& recording, Deadline deadline) {
  std::shared_ptr<Stream> stream = recording.stream.lock();
  if (stream && stream->attended()) {
    ncclResult_t r = stream->drive(recording.number, deadline);
    return r == ncclSuccess ? recording.result : r;
  }
  for (;;) {
    uint32_t seen = recording.bell.look();
    if (recording.has_happened()) return recording.result;
    int64_t ns = until(deadline, kSliceNs);
    if (ns == 0) return ncclInProgress;
    recording.bell.wait(seen, ns);
  }
}

ncclResult_t Stream::run(Node& node, Deadline deadline) {
  switch (node.kind) {
    case Node::Record: {
      auto [result, serial] = error_of(node.recording->comm_serial);
      node.recording->happen(result, serial);
      return ncclSuccess;
    }
    case Node::Wait:
      // What comes after the wait relies on the work before the record.
      if (ncclResult_t r = await(*node.recording, deadline); r != ncclSuccess) {
        if (r == ncclInProgress) return r;
        note_error(node.recording->comm_serial, r);
      }
      return ncclSuccess;
    case Node::After:
      return node.stream->drive(node.number, deadline);
    default:
      return run_task(node, deadline);
  }
}

ncclResult_t Stream::run_task(Node& node, Deadline deadline) {
  if (!node.came) {
    node.came = true;
    node.leads = node.task->come();
  }
  ncclResult_t r = node.leads ? node.task->run(deadline) : node.task->wait(deadline);
  if (r != ncclInProgress) note_errors(*node.task);
  return r;
}

void Stream::note_errors(const Task& task) {
  for (auto& [serial, result] : task.errors()) note_error(serial, result);
}

void Stream::note_error(uint64_t serial, ncclResult_t result) {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  if (errors_.size() == kMostErrors) {
    auto old = std::find_if_not(errors_.begin(), errors_.end(), is_untaken);
    if (old != errors_.end()) errors_.erase(old);
  }
  auto it = errors_.find(serial);
  if (it != errors_.end())
    it->second.taken = false;
  else if (errors_.size() < kMostErrors)
    errors_.emplace(serial, Error{result, false});
  failed_.store(true);
}

std::pair<ncclResult_t, uint64_t> Stream::error_of(uint64_t comm_serial) {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  auto it = find_error(comm_serial);
  if (it == errors_.end()) return {ncclSuccess, comm_serial};
  return {it->second.result, it->first};
}

// Of anyone: one that nobody has taken.
Stream::Errors::iterator Stream::find_error(uint64_t comm_serial) {
  return comm_serial == kAnyone ? std::find_if(errors_.begin(), errors_.end(), is_untaken)
                                : errors_.find(comm_serial);
}

ncclResult_t Stream::take_error(uint64_t comm_serial) {
  if (!failed_.load()) return ncclSuccess;
  std::lock_guard<std::mutex> lock(queue_mutex_);
  auto it = find_error(comm_serial);
  if (it == errors_.end() || it->second.taken) return ncclSuccess;
  it->second.taken = true;
  failed_.store(std::any_of(errors_.begin(), errors_.end(), is_untaken));
  return it->second.result;
}

bool Stream::is_driven() {
  std::unique_lock<std::mutex> running(running_, std::try_to_lock);
  return !running;
}

ncclResult_t Stream::drive(uint64_t target, Deadline deadline) {
  while (completed_.load() < target) {
    uint32_t seen = completions_.look();
    std::unique_lock<std::mutex> running(running_, std::try_to_lock);
    if (!running) {
      int64_t ns = until(deadline, kSliceNs);
      if (ns == 0) return ncclInProgress;
      completions_.wait(seen, ns);
      continue;
    }
    ncclResult_t r = ncclSuccess;
    while (completed_.load() < target && r != ncclInProgress) {
      Node* node;
      {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        node = &queue_.front();
      }
      try {
        r = run(*node, deadline);
      } catch (const std::bad_alloc&) {  // work can stop at any step: try again when there is memory
        usleep(1000);
        if (until(deadline, kSliceNs)) continue;
        r = ncclInProgress;
      }
      if (r == ncclInProgress) break;
      Nodes gone;
      {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        gone.splice(gone.end(), queue_, queue_.begin());
      }
      completed_.fetch_add(1);
      completions_.ring();
    }
    running.unlock();
    completions_.ring();
    if (r == ncclInProgress) return r;
  }
  return ncclSuccess;
}

Stream::Head Stream::head() {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  if (queue_.empty()) return {};
  const Node& node = queue_.front();
  if (node.kind == Node::Wait) return {nullptr, node.recording->stream.lock()};
  return {node.task, node.stream};
}

ncclResult_t Stream::synchronize(Deadline deadline, uint64_t comm_serial) {
  ncclResult_t r = drive(enqueued_.load(), deadline);
  return r == ncclInProgress ? r : take_error(comm_serial);
}

// The stream's thread runs work for which no caller waits. A caller that synchronizes immediately runs the
// work itself, which saves two thread switches. So this thread waits for a moment, in which nothing wakes it.
void Stream::work() {
  name_this_thread("pynccl-stream");
  int idle_ticks = 0, left_ticks = 0;
  int64_t grace_ns = kLeastGraceNs;
  for (;;) {
    uint32_t arrivals = arrivals_.look(), stopping = stopping_.look();
    bool stop = stop_.load();  // after look(), so that no ring is missed
    uint64_t done = completed_.load(), all = enqueued_.load();
    if (done == all) {
      if (stop) return;
      if (++idle_ticks < kIdleTicks)
        stopping_.wait(stopping, grace_ns);
      else
        arrivals_.wait(arrivals, kSliceNs * 600);
      continue;
    }
    idle_ticks = 0;
    if (!stop) stopping_.wait(stopping, grace_ns);
    const bool ran = completed_.load() != done;
    // A wait for the caller would end with each call, which costs the caller's core a thread switch.
    if (!stop && (ran || (is_driven() && ++left_ticks < kIdleTicks))) {
      grace_ns = std::min(2 * grace_ns, kMostGraceNs);
      if (ran) left_ticks = 0;
      continue;
    }
    grace_ns = kLeastGraceNs;
    left_ticks = 0;
    if (drive(all, after_ms(0)) == ncclInProgress) drive(all, after_ms(1000));
  }
}

}  // namespace pncpu
