// Groups: the calls that a thread records between ncclGroupStart and ncclGroupEnd, and how they are issued.
#pragma once

#include <functional>
#include <string>

#include "base/guard.hpp"
#include "calls/issue.hpp"
#include "comm/creation.hpp"

namespace pncpu {

// A call that creates, ends or changes a communicator. `run` may block; the jobs of one group run
// concurrently. A job that is not `blocking` runs in the background, and the state of `comm` shows its result
// (ncclCommGetAsyncError).
struct Job {
  const char* function;
  std::function<ncclResult_t()> run;
  std::shared_ptr<Comm> comm = nullptr;                 // its state shows the progress
  std::vector<std::shared_ptr<Creation>> creates = {};  // fail if the job fails
  bool blocking = true;
  bool ends = false;  // destroys or aborts; runs even if its group fails
};

class Group {
 public:
  ~Group();
  int depth = 0;
  // ncclInvalidArgument if the group mixes blocking and non-blocking communicators.
  ncclResult_t add(Submission call);
  ncclResult_t add(Job job);
  void spoil(ncclResult_t code) noexcept;
  // How many communicators on the device this group creates so far.
  int copies_on(int device) const;
  ncclResult_t finish();
  // Drops all calls, as ncclGroupSimulateEnd does. The estimate is for the last call.
  ncclResult_t simulate(float* microseconds);
  // In a forked child: forgets the calls of the parent's thread without destroying them.
  void abandon() noexcept;

 private:
  enum class Mode { Open, Blocking, NonBlocking };
  ncclResult_t join(bool blocking);
  void clear();
  ncclResult_t drop(const char* why);
  std::vector<Submission> calls_;
  std::vector<Job> jobs_;
  Mode mode_ = Mode::Open;
  ErrorCode error_;
  std::string error_text_;
  uint32_t epoch_ = process_epoch();
  // A forked child keeps its parent's calls here forever.
  alignas(std::vector<Submission>) char parents_calls_[sizeof(std::vector<Submission>)];
  alignas(std::vector<Job>) char parents_jobs_[sizeof(std::vector<Job>)];
};
Group& this_thread_group();

ncclResult_t submit(Submission call);
ncclResult_t submit(Job job);
// A wrong call inside a group makes the whole group fail.
ncclResult_t spoil(ncclResult_t code) noexcept;

// The body of an exported function that can be part of a group.
template <class Body>
ncclResult_t in_group(const char* function, Body body) noexcept {
  return spoil(guarded(function, body));
}

}  // namespace pncpu
