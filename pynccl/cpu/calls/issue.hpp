// From calls to launches: the calls of one group are queued all or none.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "calls/launch.hpp"

namespace pncpu {

// An operation that owns its communicator and stream until it is issued.
struct Submission {
  Op op;
  std::shared_ptr<Comm> comm;
  std::shared_ptr<Stream> stream;
  cudaStream_t stream_handle = nullptr;  // for messages
};

// The lock under which work is queued, and communicators and streams end. So all streams and communicators of
// a process see its groups in one order.
std::mutex& issue_lock();

// Returns ncclInProgress for non-blocking communicators. If the communicator or stream of a call has ended
// meanwhile it is an error, and nothing is issued.
struct Submissions {
  Submission* first;
  size_t count;
  Submission* begin() const { return first; }
  Submission* end() const { return first + count; }
};
ncclResult_t issue(Submissions calls);  // takes their operations

// The stream behind a handle: 0, 1 and 2 are those of the communicator's device. nullptr after fail().
std::shared_ptr<Stream> stream_of(const std::shared_ptr<Comm>& comm, cudaStream_t handle,
                                  const char* function);

// Queues one node; under the issue lock.
ncclResult_t enqueue(const std::shared_ptr<Stream>& stream, Node node, const char* function);

}  // namespace pncpu
