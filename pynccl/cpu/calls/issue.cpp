#include "calls/issue.hpp"

#include <algorithm>

namespace pncpu {
namespace {

struct IssueLock {
  std::mutex mutex;
};

// Calls that share a communicator or a stream, directly or through others, run together.
struct Cluster {
  std::vector<Comm*> comms;
  std::vector<Stream*> streams;
  std::vector<Submission*> calls;
  bool touches(const Submission& call) const {
    return std::count(comms.begin(), comms.end(), call.comm.get()) ||
           std::count(streams.begin(), streams.end(), call.stream.get());
  }
  void add(Submission& call) {
    if (!std::count(comms.begin(), comms.end(), call.comm.get())) comms.push_back(call.comm.get());
    if (!std::count(streams.begin(), streams.end(), call.stream.get())) streams.push_back(call.stream.get());
    calls.push_back(&call);
  }
};

std::vector<Cluster> cluster(Submissions calls) {
  std::vector<Cluster> clusters;
  for (Submission& call : calls) {
    Cluster merged;
    for (auto it = clusters.begin(); it != clusters.end();) {
      if (!it->touches(call)) {
        ++it;
        continue;
      }
      for (Submission* c : it->calls) merged.add(*c);
      it = clusters.erase(it);
    }
    merged.add(call);
    clusters.push_back(std::move(merged));
  }
  for (Cluster& c : clusters) std::sort(c.calls.begin(), c.calls.end());  // back into the order of the calls
  return clusters;
}

Batch& batch_of(Launch& launch, const std::shared_ptr<Comm>& comm) {
  for (Batch& b : launch.batches)
    if (b.comm == comm) return b;
  launch.batches.emplace_back();
  launch.batches.back().comm = comm;
  return launch.batches.back();
}

std::vector<Op>& ops_of(Batch& batch, Func func) {
  return is_collective(func) ? batch.colls : is_p2p(func) ? batch.p2p : batch.one_sided;
}

// A launch and its nodes for the streams' queues. Queueing them cannot fail.
struct Prepared {
  std::shared_ptr<Launch> launch = std::make_shared<Launch>();
  std::vector<std::pair<Stream*, Stream::Nodes>> nodes;

  explicit Prepared(const Cluster& cluster) {
    for (Submission* call : cluster.calls) add(*call);
    launch->tie(int(cluster.streams.size()));
    for (Stream* stream : cluster.streams) add(stream);
  }
  explicit Prepared(Submission& call) {
    add(call);
    add(call.stream.get());
  }
  void add(Submission& call) {
    Batch& batch = batch_of(*launch, call.comm);
    ops_of(batch, call.op.func).push_back(std::move(call.op));
  }
  void add(Stream* stream) {
    Node node;
    node.task = launch;
    nodes.emplace_back(stream, stream->nodes_for(std::move(node)));
  }

  ncclResult_t check() const {
    for (const Batch& b : launch->batches)
      if (ncclResult_t r = check_messages_to_itself(b.p2p, b.comm->rank); r != ncclSuccess) return r;
    return ncclSuccess;
  }

  void queue() noexcept {
    for (Batch& b : launch->batches) {
      b.ticket = b.comm->turns.take();
      for (Op& op : b.colls) b.comm->count_issue(op);
      for (Op& op : b.p2p) b.comm->count_issue(op);
      for (Op& op : b.one_sided) b.comm->count_issue(op);
    }
    for (auto& [stream, list] : nodes) stream->push(std::move(list));
  }
};

ncclResult_t check_alive(const Submission& call) {
  if (call.stream->ended())
    return fail_in(("nccl" + std::string(func_name(call.op.func))).c_str(), ncclInvalidUsage,
                   "its stream %p was destroyed before the call was issued",
                   static_cast<void*>(call.stream_handle));
  return call.comm->check_accepts(func_name(call.op.func), call.op.func == Func::Recv);
}

// A collective of one rank is done by a copy, without a launch (NCCL's src/enqueue.cc: taskAppend).
bool is_launched_later(const Submission& call) {
  return !call.comm->blocking && (call.comm->nranks > 1 || !is_collective(call.op.func));
}

ncclResult_t wait_all(Submissions calls) {
  ncclResult_t result = ncclSuccess;
  for (const Submission& call : calls) {
    ncclResult_t r = call.stream->synchronize(kForever, call.comm->serial);
    if (result == ncclSuccess) result = r;
  }
  return result;
}

}  // namespace

std::mutex& issue_lock() { return per_process<IssueLock>().mutex; }

ncclResult_t issue(Submissions calls) {
  bool wait = false, later = false;
  {
    std::lock_guard<std::mutex> lock(issue_lock());
    for (const Submission& call : calls)
      if (ncclResult_t r = check_alive(call); r != ncclSuccess) return r;
    std::vector<Prepared> prepared;
    if (calls.count == 1)
      prepared.emplace_back(*calls.first);
    else
      for (const Cluster& c : cluster(calls)) prepared.emplace_back(c);
    for (const Prepared& p : prepared)
      if (ncclResult_t r = p.check(); r != ncclSuccess) return r;
    for (const Submission& call : calls) call.comm->issued_on(call.stream);
    for (Prepared& p : prepared) p.queue();
    for (const Submission& call : calls) {
      wait = wait || call.comm->blocking_calls;
      if (is_launched_later(call)) call.comm->comm_state.answer_later(), later = true;
    }
  }
  if (ncclResult_t r = wait ? wait_all(calls) : ncclSuccess; r != ncclSuccess) return r;
  return later ? ncclInProgress : ncclSuccess;
}

std::shared_ptr<Stream> stream_of(const std::shared_ptr<Comm>& comm, cudaStream_t handle,
                                  const char* function) {
  auto value = reinterpret_cast<uintptr_t>(handle);
  if (value > 2) return find_handle<Stream>(handle, function);
  if (comm) return value == 2 ? comm->domain->per_thread() : comm->domain->legacy();
  fail_in(function, ncclInvalidArgument, "stream %p is a communicator's default stream, but comm is NULL",
          static_cast<void*>(handle));
  return nullptr;
}

ncclResult_t enqueue(const std::shared_ptr<Stream>& stream, Node node, const char* function) {
  if (stream->ended())
    return fail_in(function, ncclInvalidArgument, "the stream was destroyed by another thread");
  stream->push(stream->nodes_for(std::move(node)));
  return ncclSuccess;
}

}  // namespace pncpu
