// ncclGroupStart and ncclGroupEnd: what a thread records in between, and how it is issued.
#pragma once

#include <functional>
#include <string>

#include "base/guard.hpp"
#include "calls/issue.hpp"

namespace pncpu {

// A call that makes, ends or changes a communicator. `run` may block; the jobs of one group run at the same
// time. Without `blocking` it runs behind the caller's back, and `comm` says how it went
// (ncclCommGetAsyncError).
struct Job {
  std::function<ncclResult_t()> run;
  std::shared_ptr<Comm> comm;  // that it creates or changes
  bool blocking = true;
  bool ends = false;  // a destruction or an abort, which happens even if its group fails
};

class Group {
 public:
  ~Group();
  int depth = 0;
  void add(Submission call) { calls_.push_back(std::move(call)); }
  void add(Job job) { jobs_.push_back(std::move(job)); }
  void spoil(ncclResult_t code);
  // How many communicators that are created in this group are on the device already.
  int copies_on(int device) const;
  ncclResult_t finish();
  // Drops everything, as ncclGroupSimulateEnd does; the estimate is that of the last call.
  ncclResult_t simulate(float* microseconds);
  // Forgets what the forked child has from the thread that called fork, without touching it.
  void abandon();

 private:
  ncclResult_t drop(const char* why);
  std::vector<Submission> calls_;
  std::vector<Job> jobs_;
  ncclResult_t error_ = ncclSuccess;
  std::string error_text_;
  uint32_t epoch_ = process_epoch();
};
Group& this_thread_group();

ncclResult_t submit(Submission call);
ncclResult_t submit(Job job);
// A wrong call inside a group spoils the group.
ncclResult_t spoil(ncclResult_t code);

// The body of an exported function that can be part of a group.
template <class Body>
ncclResult_t in_group(const char* function, Body body) noexcept {
  return spoil(guarded(function, body));
}

}  // namespace pncpu
