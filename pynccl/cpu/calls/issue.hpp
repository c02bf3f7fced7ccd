// From calls to launches: what one group issued, queued whole or not at all.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "calls/launch.hpp"

namespace pncpu {

// An operation with what it names, which it owns until it is issued.
struct Submission {
  Op op;
  std::shared_ptr<Comm> comm;
  std::shared_ptr<Stream> stream;
  cudaStream_t stream_handle = nullptr;  // for messages
};

// Every rank's streams and communicators see the groups of a process in one order. Under this lock work is
// queued, and communicators and streams end.
std::mutex& issue_lock();

// ncclInProgress for non-blocking communicators. A call whose communicator or stream has ended meanwhile is
// an error, and nothing is issued.
ncclResult_t issue(const std::vector<Submission>& calls);

// The stream behind a handle: 0, 1 and 2 are those of the communicator's device. nullptr after fail().
std::shared_ptr<Stream> stream_of(const std::shared_ptr<Comm>& comm, cudaStream_t handle,
                                  const char* function);

// Queues one node; under the issue lock.
ncclResult_t enqueue(const std::shared_ptr<Stream>& stream, Node node, const char* function);

}  // namespace pncpu
