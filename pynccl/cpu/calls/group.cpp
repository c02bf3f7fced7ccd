#include "calls/group.hpp"

#include <algorithm>
#include <condition_variable>

#include "base/threads.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

struct Outcome {
  ncclResult_t code = ncclSuccess;
  std::string text;
};

Outcome run_guarded(const Job& job) {
  Outcome outcome;
  outcome.code = guarded("ncclGroupEnd", job.run);
  if (outcome.code != ncclSuccess) outcome.text = last_error();
  return outcome;
}

// Jobs that run at the same time, each in a thread; all of them, or none where there are not enough threads:
// the ranks of one communicator wait for each other.
class Together {
 public:
  explicit Together(std::vector<Job> jobs) : jobs_(std::move(jobs)), outcomes_(jobs_.size()) {}

  Outcome run() {
    if (jobs_.size() == 1) return run_guarded(jobs_[0]);
    std::exception_ptr no_thread;
    try {
      for (; started_ < jobs_.size(); ++started_)
        start_thread("a communicator of the group", [this, i = started_] { work(i); });
    } catch (...) {
      no_thread = std::current_exception();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    go_ = no_thread ? Go::Never : Go::Now;
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ == started_; });
    if (no_thread) std::rethrow_exception(no_thread);
    for (Outcome& outcome : outcomes_)
      if (outcome.code != ncclSuccess) return std::move(outcome);
    return {};
  }

 private:
  enum class Go { Wait, Now, Never };
  void work(size_t i) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return go_ != Go::Wait; });
    if (go_ == Go::Now) {
      lock.unlock();
      outcomes_[i] = run_guarded(jobs_[i]);
      lock.lock();
    }
    ++done_;
    changed_.notify_all();
  }
  std::vector<Job> jobs_;
  std::vector<Outcome> outcomes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Go go_ = Go::Wait;
  size_t started_ = 0, done_ = 0;
};

void cancel(const std::vector<Job>& jobs, const char* why) {
  for (const Job& job : jobs)
    if (job.comm) cancel_creation(*job.comm, why);
}

// The jobs come first, as in NCCL: a group may hold a split and a collective on its parent.
ncclResult_t run_all(std::vector<Job> jobs, const std::vector<Submission>& calls) {
  if (!jobs.empty()) {
    std::vector<Job> kept = jobs;
    Outcome outcome;
    try {
      outcome = Together(std::move(jobs)).run();
    } catch (...) {
      cancel(kept, "its creation could not be started");
      throw;
    }
    if (outcome.code != ncclSuccess) {
      set_last_error(outcome.text);
      return outcome.code;
    }
  }
  return calls.empty() ? ncclSuccess : issue(calls);
}

// The communicators answer ncclInProgress until all is done.
ncclResult_t run_in_background(std::vector<Job> jobs, std::vector<Submission> calls) {
  std::vector<std::shared_ptr<Comm>> comms;
  for (const Job& job : jobs)
    if (job.comm) comms.push_back(job.comm);
  for (auto& comm : comms) comm->standing.set_pending(ncclInProgress);
  auto body = [jobs = std::move(jobs), calls = std::move(calls), comms] {
    ncclResult_t r = guarded("ncclGroupEnd", [&] { return run_all(jobs, calls); });
    if (r == ncclInProgress) r = ncclSuccess;
    for (auto& comm : comms) {
      if (r != ncclSuccess && comm->error() == ncclSuccess) comm->fail_with(r, last_error(), false);
      comm->standing.set_pending(r);
    }
  };
  try {
    start_thread("what a non-blocking communicator does in the background", std::move(body));
  } catch (...) {
    for (auto& comm : comms) comm->standing.set_pending(ncclSystemError);
    throw;
  }
  return ncclInProgress;
}

}  // namespace

Group& this_thread_group() {
  static thread_local Group group;
  group.abandon();
  return group;
}

Group::~Group() { abandon(); }

void Group::abandon() {
  if (epoch_ == process_epoch()) return;
  new std::vector<Submission>(std::move(calls_));
  new std::vector<Job>(std::move(jobs_));
  calls_.clear();
  jobs_.clear();
  depth = 0;
  error_ = ncclSuccess;
  epoch_ = process_epoch();
}

void Group::spoil(ncclResult_t code) {
  if (error_ != ncclSuccess) return;
  error_ = code;
  error_text_ = last_error();
}

int Group::copies_on(int device) const {
  return int(std::count_if(jobs_.begin(), jobs_.end(),
                           [&](const Job& job) { return job.comm && job.comm->device == device; }));
}

// What ends communicators goes on: whoever cleans up after a failure must not be left with them.
ncclResult_t Group::drop(const char* why) {
  std::vector<Job> jobs = std::move(jobs_);
  calls_.clear();
  jobs_.clear();
  error_ = ncclSuccess;
  auto ends = std::stable_partition(jobs.begin(), jobs.end(), [](const Job& job) { return !job.ends; });
  std::vector<Job> ending(ends, jobs.end());
  jobs.erase(ends, jobs.end());
  cancel(jobs, why);
  return ending.empty() ? ncclSuccess : run_all(std::move(ending), {});
}

ncclResult_t Group::finish() {
  if (error_ != ncclSuccess) {
    ncclResult_t code = error_;
    std::string text = std::move(error_text_);
    drop("the group that was to create it failed");
    set_last_error(text);
    return code;
  }
  std::vector<Submission> calls = std::move(calls_);
  std::vector<Job> jobs = std::move(jobs_);
  calls_.clear();
  jobs_.clear();
  if (jobs.empty()) return calls.empty() ? ncclSuccess : issue(calls);
  bool background = std::any_of(jobs.begin(), jobs.end(), [](const Job& job) { return !job.blocking; });
  return background ? run_in_background(std::move(jobs), std::move(calls)) : run_all(std::move(jobs), calls);
}

// That of a machine that moves 5 GB/s and needs 5 us a call.
ncclResult_t Group::simulate(float* microseconds) {
  *microseconds = -1.0f;
  for (const Submission& call : calls_)
    *microseconds = 5.0f + float(double(call.op.bytes()) * call.comm->nranks / 5000.0);
  ncclResult_t spoiled = error_;
  ncclResult_t r = drop("the group that was to create it was only simulated");
  return spoiled != ncclSuccess ? spoiled : r;
}

ncclResult_t submit(Submission call) {
  Group& group = this_thread_group();
  if (group.depth == 0) return issue({call});
  group.add(std::move(call));
  return ncclSuccess;
}

ncclResult_t submit(Job job) {
  Group& group = this_thread_group();
  if (group.depth > 0) {
    bool in_progress = !job.blocking;
    group.add(std::move(job));
    return in_progress ? ncclInProgress : ncclSuccess;
  }
  return job.blocking ? job.run() : run_in_background({std::move(job)}, {});
}

ncclResult_t spoil(ncclResult_t code) {
  Group& group = this_thread_group();
  if (group.depth > 0 && code != ncclSuccess && code != ncclInProgress) group.spoil(code);
  return code;
}

}  // namespace pncpu
