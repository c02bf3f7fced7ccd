// This library's own additions to the C API: streams and events.
#include <fcntl.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/device.hpp"
#include "base/guard.hpp"
#include "calls/issue.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

// `comm` may be NULL for a stream that a caller created. A default stream belongs to a communicator.
std::shared_ptr<Stream> stream_for(ncclComm_t comm, cudaStream_t handle, const char* function) {
  std::shared_ptr<Comm> c;
  if (comm && any_comm_of(comm, function, &c) != ncclSuccess) return nullptr;
  return stream_of(c, handle, function);
}

uint64_t serial_of(ncclComm_t comm) {
  std::shared_ptr<Comm> c = comm ? handles<Comm>().find(comm) : nullptr;
  return c ? c->serial : Stream::kAnyone;
}

// A wait without a time-out is registered for the deadlock search after this time.
constexpr int kSoonMs = 100;

// 1 is CUDA's cudaStreamNonBlocking.
constexpr unsigned kNonBlocking = 1, kAttended = 2;

Deadline deadline_of(int64_t ms) { return ms < 0 ? kForever : after_ms(std::min<int64_t>(ms, 1e12)); }

ncclResult_t create_stream(cudaStream_t* stream, unsigned int flags, const char* function) {
  REQUIRE_POINTER(function, stream);
  *stream = nullptr;
  if (flags > (kNonBlocking | kAttended))
    return fail_in(function, ncclInvalidArgument,
                   "flags is %u, expected 0, 1 (cudaStreamNonBlocking), 2 (no thread) or 3 (both)", flags);
  std::shared_ptr<Stream> made =
      Domain::of(default_device(), 0)->create(!(flags & kNonBlocking), flags & kAttended);
  *stream = static_cast<cudaStream_t>(handles<Stream>().add(std::move(made)));
  return ncclSuccess;
}

// What stands for the record of an event that was never recorded.
std::shared_ptr<Recording> happened_before() {
  auto recording = std::make_shared<Recording>();
  recording->happen(ncclSuccess, 0);
  return recording;
}

}  // namespace
}  // namespace pncpu

using namespace pncpu;

extern "C" {

// The caller of a thread that creates a communicator has given up: make this creation fail, and the thread's
// next ones until `on` is 0.
ncclResult_t pyncclCpuInterrupt(int thread, int on) {
  return guarded("pyncclCpuInterrupt", [&] {
    interrupt_creations(thread, on != 0);
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuCallsFor(int thread, int limited) {
  const char* function = "pyncclCpuCallsFor";
  return guarded(function, [&] {
    if (thread <= 0)
      return fail_in(function, ncclInvalidArgument, "thread is %d, expected a thread's id", thread);
    this_caller() = {thread, limited != 0};
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuCreationTimeout(int64_t timeoutMs) {
  return guarded("pyncclCpuCreationTimeout", [&] {
    limit_creations(timeoutMs < 0 ? HUGE_VAL : double(timeoutMs) / 1e3);
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuStreamCreate(cudaStream_t* stream) {
  return guarded("pyncclCpuStreamCreate", [&] { return create_stream(stream, 0, "pyncclCpuStreamCreate"); });
}

ncclResult_t pyncclCpuStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  const char* function = "pyncclCpuStreamCreateWithFlags";
  return guarded(function, [&] { return create_stream(stream, flags, function); });
}

// As in CUDA the stream finishes its work first; the call does not wait.
ncclResult_t pyncclCpuStreamDestroy(cudaStream_t stream) {
  return guarded("pyncclCpuStreamDestroy", [&] {
    std::shared_ptr<Stream> found = handles<Stream>().take(stream);
    if (!found) return refuse_handle<Stream>(stream, "pyncclCpuStreamDestroy");
    std::lock_guard<std::mutex> lock(issue_lock());
    found->end();
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuStreamQuery(ncclComm_t comm, cudaStream_t stream) {
  return guarded("pyncclCpuStreamQuery", [&] {
    std::shared_ptr<Stream> s = stream_for(comm, stream, "pyncclCpuStreamQuery");
    if (!s) return ncclInvalidArgument;
    return s->idle() ? s->take_error(serial_of(comm)) : ncclInProgress;
  });
}

ncclResult_t pyncclCpuStreamSynchronize(ncclComm_t comm, cudaStream_t stream, int64_t timeoutMs) {
  return guarded("pyncclCpuStreamSynchronize", [&] {
    std::shared_ptr<Stream> s = stream_for(comm, stream, "pyncclCpuStreamSynchronize");
    if (!s) return ncclInvalidArgument;
    if (timeoutMs >= 0) return s->synchronize(deadline_of(timeoutMs), serial_of(comm));
    ncclResult_t r = s->synchronize(after_ms(kSoonMs), serial_of(comm));
    if (r != ncclInProgress) return r;
    Deadlocks::Waiter waits(s);
    return s->synchronize(kForever, serial_of(comm));
  });
}

ncclResult_t pyncclCpuStreamAwait(ncclComm_t comm, cudaStream_t stream, int64_t sliceMs) {
  const char* function = "pyncclCpuStreamAwait";
  return guarded(function, [&] {
    std::shared_ptr<Stream> s = stream_for(comm, stream, function);
    if (!s) return ncclInvalidArgument;
    if (sliceMs < 0)
      return fail_in(function, ncclInvalidArgument, "sliceMs is %lld, expected 0 or more",
                     (long long)sliceMs);
    Deadlocks::Waiter waits(s);
    ncclResult_t r = s->synchronize(deadline_of(sliceMs), serial_of(comm));
    if (r == ncclInProgress) waits.pause();
    return r;
  });
}

ncclResult_t pyncclCpuStreamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event) {
  const char* function = "pyncclCpuStreamWaitEvent";
  return guarded(function, [&] {
    std::shared_ptr<Stream> s = stream_for(comm, stream, function);
    std::shared_ptr<Event> e = find_handle<Event>(event, function);
    if (!s || !e) return ncclInvalidArgument;
    std::lock_guard<std::mutex> lock(issue_lock());
    Node node;
    node.kind = Node::Wait;
    node.recording = e->newest();
    return node.recording ? enqueue(s, std::move(node), function) : ncclSuccess;
  });
}

ncclResult_t pyncclCpuEventCreate(cudaEvent_t* event) {
  return guarded("pyncclCpuEventCreate", [&] {
    REQUIRE_POINTER("pyncclCpuEventCreate", event);
    *event = nullptr;
    *event = static_cast<cudaEvent_t>(handles<Event>().add(std::make_shared<Event>()));
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuEventDestroy(cudaEvent_t event) {
  return guarded("pyncclCpuEventDestroy", [&] {
    return handles<Event>().take(event) ? ncclSuccess : refuse_handle<Event>(event, "pyncclCpuEventDestroy");
  });
}

ncclResult_t pyncclCpuEventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream) {
  const char* function = "pyncclCpuEventRecord";
  return guarded(function, [&] {
    std::shared_ptr<Stream> s = stream_for(comm, stream, function);
    std::shared_ptr<Event> e = find_handle<Event>(event, function);
    if (!s || !e) return ncclInvalidArgument;
    auto recording = std::make_shared<Recording>();
    recording->stream = s;
    recording->comm_serial = serial_of(comm);
    std::lock_guard<std::mutex> lock(issue_lock());
    Node node;
    node.kind = Node::Record;
    node.recording = recording;
    ncclResult_t r = enqueue(s, std::move(node), function);
    if (r != ncclSuccess) return r;
    recording->number = s->enqueued();
    e->record(std::move(recording));
    return r;
  });
}

ncclResult_t pyncclCpuEventQuery(cudaEvent_t event) {
  return guarded("pyncclCpuEventQuery", [&] {
    std::shared_ptr<Event> e = find_handle<Event>(event, "pyncclCpuEventQuery");
    if (!e) return ncclInvalidArgument;
    std::shared_ptr<Recording> newest = e->newest();
    if (!newest) return ncclSuccess;
    const ncclResult_t r = newest->state();
    std::shared_ptr<Stream> s = r == ncclInProgress ? newest->stream.lock() : nullptr;
    if (s) s->hurry();
    return r;
  });
}

ncclResult_t pyncclCpuEventNotify(cudaEvent_t event, int descriptor) {
  const char* function = "pyncclCpuEventNotify";
  return guarded(function, [&] {
    std::shared_ptr<Event> e = find_handle<Event>(event, function);
    if (!e) return ncclInvalidArgument;
    const int flags = fcntl(descriptor, F_GETFL);
    if (flags >= 0 && !(flags & O_NONBLOCK))
      return fail_in(function, ncclInvalidArgument, "descriptor %d blocks, expected O_NONBLOCK", descriptor);
    const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
      return fail_in(function, errno == EBADF ? ncclInvalidArgument : ncclSystemError, "descriptor %d: %s",
                     descriptor, strerror(errno));
    std::shared_ptr<Recording> newest = e->newest();
    if (!newest) newest = happened_before();
    newest->notify(own);
    // The event may have happened in between.
    if (newest->has_happened()) newest->notify(-1);
    if (std::shared_ptr<Stream> s = newest->stream.lock()) s->hurry();
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuEventSynchronize(cudaEvent_t event, int64_t timeoutMs) {
  return guarded("pyncclCpuEventSynchronize", [&] {
    std::shared_ptr<Event> e = find_handle<Event>(event, "pyncclCpuEventSynchronize");
    if (!e) return ncclInvalidArgument;
    std::shared_ptr<Recording> newest = e->newest();
    if (!newest) return ncclSuccess;
    // As in a wait for the stream, this thread runs the work.
    std::shared_ptr<Stream> s = newest->stream.lock();
    const ncclResult_t r = s ? s->drive(newest->number, deadline_of(timeoutMs)) : ncclSuccess;
    return r == ncclInProgress ? r : await(*newest, deadline_of(timeoutMs));
  });
}

}  // extern "C"
