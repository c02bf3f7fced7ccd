// ncclGroupStart and ncclGroupEnd: what a thread records in between, and how it is issued.
#pragma once

#include <functional>

#include "comm/comm.hpp"

namespace pncpu {

// A call that makes, ends or changes a communicator. `run` may block; the jobs of one group run at the same
// time. Without `blocking` it runs behind the caller's back, and `comm` says how it went
// (ncclCommGetAsyncError).
struct Job {
  std::function<ncclResult_t()> run;
  std::shared_ptr<Comm> comm;
  bool blocking = true;
};

struct Group {
  int depth = 0;
  std::vector<Op> ops;
  std::vector<Job> jobs;
  ncclResult_t error = ncclSuccess;
  ncclResult_t finish();
  void clear();
};
Group& this_thread_group();

ncclResult_t submit(const Op& op);
ncclResult_t submit(Job job);
// A wrong call inside a group spoils the group.
ncclResult_t spoil(ncclResult_t code);

}  // namespace pncpu
