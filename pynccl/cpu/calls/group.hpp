// ncclGroupStart and ncclGroupEnd: what a thread records in between, and how it is issued.
#pragma once

#include <functional>
#include <string>

#include "base/guard.hpp"
#include "calls/issue.hpp"
#include "comm/creation.hpp"

namespace pncpu {

// A call that makes, ends or changes a communicator. `run` may block; the jobs of one group run at the same
// time. Without `blocking` it runs behind the caller's back, and `comm` says how it went
// (ncclCommGetAsyncError).
struct Job {
  const char* function;
  std::function<ncclResult_t()> run;
  std::shared_ptr<Comm> comm = nullptr;                 // whose state says how it goes
  std::vector<std::shared_ptr<Creation>> creates = {};  // which fail with it
  bool blocking = true;
  bool ends = false;  // a destruction or an abort, which happens even if its group fails
};

class Group {
 public:
  ~Group();
  int depth = 0;
  // ncclInvalidArgument where blocking and non-blocking communicators meet.
  ncclResult_t add(Submission call);
  ncclResult_t add(Job job);
  void spoil(ncclResult_t code) noexcept;
  // How many communicators that are created in this group are on the device already.
  int copies_on(int device) const;
  ncclResult_t finish();
  // Drops everything, as ncclGroupSimulateEnd does; the estimate is that of the last call.
  ncclResult_t simulate(float* microseconds);
  // Forgets what the forked child has from the thread that called fork, without touching it.
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
  // What a forked child has of its parent's, for ever.
  alignas(std::vector<Submission>) char parents_calls_[sizeof(std::vector<Submission>)];
  alignas(std::vector<Job>) char parents_jobs_[sizeof(std::vector<Job>)];
};
Group& this_thread_group();

ncclResult_t submit(Submission call);
ncclResult_t submit(Job job);
// A wrong call inside a group spoils the group.
ncclResult_t spoil(ncclResult_t code) noexcept;

// The body of an exported function that can be part of a group.
template <class Body>
ncclResult_t in_group(const char* function, Body body) noexcept {
  return spoil(guarded(function, body));
}

}  // namespace pncpu
