// This library's own additions to the C API: streams and events.
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

// Handles map to owners, so that a stream outlives the calls that still use it.
template <class T>
struct Shared {
  std::shared_ptr<T> object;
};
HandleTable<Shared<Stream>>& streams() {
  static auto* table = new HandleTable<Shared<Stream>>;
  return *table;
}
HandleTable<Shared<Event>>& events() {
  static auto* table = new HandleTable<Shared<Event>>;
  return *table;
}

std::shared_ptr<Event> find_event(cudaEvent_t handle, const char* function) {
  Shared<Event>* found = events().find(handle);
  if (found) return found->object;
  fail(ncclInvalidArgument, "%s: event %p is not an event of this library, or was destroyed", function,
       static_cast<void*>(handle));
  return nullptr;
}

// A NULL comm is for the streams that a caller created; the default stream is some communicator's.
std::shared_ptr<Stream> stream_for(ncclComm_t comm, cudaStream_t handle, const char* function) {
  Comm* c = nullptr;
  if (comm && !(c = comm_of(comm, function, false))) return nullptr;
  return find_stream(c, handle, function);
}

uint64_t serial_of(ncclComm_t comm) {
  Comm* c = comm ? comms().find(comm) : nullptr;
  return c ? c->serial : Stream::kAnyone;
}

Deadline deadline_of(int64_t ms) { return ms < 0 ? kForever : after_ms(ms); }

}  // namespace

std::shared_ptr<Stream> find_stream(Comm* comm, cudaStream_t handle, const char* function) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) {
    if (comm && comm->default_stream) return comm->default_stream;
    fail(ncclInvalidArgument, "%s: stream %p is a communicator's default stream, but comm is NULL", function,
         static_cast<void*>(handle));
    return nullptr;
  }
  if (Shared<Stream>* found = streams().find(handle)) return found->object;
  fail(ncclInvalidArgument, "%s: stream %p was not created by pyncclCpuStreamCreate, or was destroyed",
       function, static_cast<void*>(handle));
  return nullptr;
}

}  // namespace pncpu

using namespace pncpu;

extern "C" {

// Who waits for a thread's creation of a communicator has given it up: it fails, and the next ones of that
// thread.
ncclResult_t pyncclCpuInterrupt(int thread, int on) {
  interrupt_creations(thread, on != 0);
  return ncclSuccess;
}

ncclResult_t pyncclCpuStreamCreate(cudaStream_t* stream) {
  if (!stream) return fail(ncclInvalidArgument, "pyncclCpuStreamCreate: stream is NULL");
  auto* made = new Shared<Stream>{std::make_shared<Stream>()};
  *stream = static_cast<cudaStream_t>(streams().add(made));
  return *stream ? ncclSuccess : fail(ncclInternalError, "this process has created too many streams");
}

// As in CUDA the stream finishes its work first, and the call does not wait for that.
ncclResult_t pyncclCpuStreamDestroy(cudaStream_t stream) {
  std::unique_ptr<Shared<Stream>> found(streams().remove(stream));
  if (!found)
    return fail(
        ncclInvalidArgument,
        "pyncclCpuStreamDestroy: stream %p was not created by pyncclCpuStreamCreate, or was destroyed",
        static_cast<void*>(stream));
  if (!found->object->idle())
    std::thread([last = std::move(found->object)] { last->drive(last->enqueued(), kForever); }).detach();
  return ncclSuccess;
}

ncclResult_t pyncclCpuStreamQuery(ncclComm_t comm, cudaStream_t stream) {
  std::shared_ptr<Stream> s = stream_for(comm, stream, "pyncclCpuStreamQuery");
  if (!s) return ncclInvalidArgument;
  return s->idle() ? s->take_error(serial_of(comm)) : ncclInProgress;
}

ncclResult_t pyncclCpuStreamSynchronize(ncclComm_t comm, cudaStream_t stream, int64_t timeoutMs) {
  std::shared_ptr<Stream> s = stream_for(comm, stream, "pyncclCpuStreamSynchronize");
  return s ? s->synchronize(deadline_of(timeoutMs), serial_of(comm)) : ncclInvalidArgument;
}

ncclResult_t pyncclCpuStreamWaitEvent(ncclComm_t comm, cudaStream_t stream, cudaEvent_t event) {
  std::shared_ptr<Stream> s = stream_for(comm, stream, "pyncclCpuStreamWaitEvent");
  std::shared_ptr<Event> e = find_event(event, "pyncclCpuStreamWaitEvent");
  if (!s || !e) return ncclInvalidArgument;
  Node node;
  node.kind = Node::Wait;
  node.event = e;
  node.number = e->recorded.load();
  s->push(std::move(node));
  return ncclSuccess;
}

ncclResult_t pyncclCpuEventCreate(cudaEvent_t* event) {
  if (!event) return fail(ncclInvalidArgument, "pyncclCpuEventCreate: event is NULL");
  *event = static_cast<cudaEvent_t>(events().add(new Shared<Event>{std::make_shared<Event>()}));
  return *event ? ncclSuccess : fail(ncclInternalError, "this process has created too many events");
}

ncclResult_t pyncclCpuEventDestroy(cudaEvent_t event) {
  Shared<Event>* found = events().remove(event);
  if (!found)
    return fail(ncclInvalidArgument,
                "pyncclCpuEventDestroy: event %p is not an event of this library, or was destroyed",
                static_cast<void*>(event));
  delete found;
  return ncclSuccess;
}

ncclResult_t pyncclCpuEventRecord(ncclComm_t comm, cudaEvent_t event, cudaStream_t stream) {
  std::shared_ptr<Stream> s = stream_for(comm, stream, "pyncclCpuEventRecord");
  std::shared_ptr<Event> e = find_event(event, "pyncclCpuEventRecord");
  if (!s || !e) return ncclInvalidArgument;
  Node node;
  node.kind = Node::Record;
  node.event = e;
  node.number = ++e->recorded;
  s->push(std::move(node));
  return ncclSuccess;
}

ncclResult_t pyncclCpuEventQuery(cudaEvent_t event) {
  std::shared_ptr<Event> e = find_event(event, "pyncclCpuEventQuery");
  if (!e) return ncclInvalidArgument;
  return e->happened.load() >= e->recorded.load() ? ncclSuccess : ncclInProgress;
}

ncclResult_t pyncclCpuEventSynchronize(cudaEvent_t event, int64_t timeoutMs) {
  std::shared_ptr<Event> e = find_event(event, "pyncclCpuEventSynchronize");
  if (!e) return ncclInvalidArgument;
  Deadline deadline = deadline_of(timeoutMs);
  uint64_t number = e->recorded.load();
  for (;;) {
    uint32_t seen = e->bell.look();
    if (e->happened.load() >= number) return ncclSuccess;
    if (Clock::now() >= deadline) return ncclInProgress;
    int64_t ns = 100 * 1000 * 1000;
    if (deadline != kForever)
      ns = std::min<int64_t>(
          ns, std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count());
    e->bell.wait(seen, std::max<int64_t>(ns, 1));
  }
}

}  // extern "C"
