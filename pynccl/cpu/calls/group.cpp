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

// Creations that will not run after all.
void cancel(const Job& job, const char* why) {
  if (!job.creates) return;
  for (auto& comm : job.comms) cancel_creation(*comm, why);
}

Outcome run_guarded(const Job& job) {
  Outcome outcome;
  outcome.code = guarded("ncclGroupEnd", [&] { return job.run(); });
  if (outcome.code == ncclSuccess || outcome.code == ncclInProgress) return outcome;
  outcome.text = last_error();
  cancel(job, outcome.text.c_str());  // an exception kept it from ending itself
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
  for (const Job& job : jobs) cancel(job, why);
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
  for (const Job& job : jobs) comms.insert(comms.end(), job.comms.begin(), job.comms.end());
  for (const Submission& call : calls) comms.push_back(call.comm);
  for (auto& comm : comms) {
    comm->standing.answer_later();
    comm->standing.set_pending(ncclInProgress);
  }
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
  clear();
  depth = 0;
  epoch_ = process_epoch();
}

void Group::clear() {
  calls_.clear();
  jobs_.clear();
  mode_ = Mode::Open;
  error_ = ncclSuccess;
}

// As in NCCL's src/group.cc (ncclAsyncLaunch), where of collectives the communicator that came last decides.
ncclResult_t Group::join(bool blocking) {
  Mode mode = blocking ? Mode::Blocking : Mode::NonBlocking;
  if (mode_ != Mode::Open && mode_ != mode)
    return fail(ncclInvalidArgument,
                "Blocking and nonblocking communicators are not allowed in the same group.");
  mode_ = mode;
  return ncclSuccess;
}

ncclResult_t Group::add(Submission call) {
  if (ncclResult_t r = join(call.comm->blocking); r != ncclSuccess) return r;
  calls_.push_back(std::move(call));
  return ncclSuccess;
}

// A destruction waits, and the whole group with it.
ncclResult_t Group::add(Job job) {
  if (job.ends)
    mode_ = Mode::Blocking;
  else if (ncclResult_t r = join(job.blocking); r != ncclSuccess)
    return r;
  jobs_.push_back(std::move(job));
  return ncclSuccess;
}

void Group::spoil(ncclResult_t code) {
  if (error_ != ncclSuccess) return;
  error_ = code;
  error_text_ = last_error();
}

int Group::copies_on(int device) const {
  int copies = 0;
  for (const Job& job : jobs_)
    for (auto& comm : job.comms) copies += job.creates && comm->device == device;
  return copies;
}

// What ends communicators goes on: whoever cleans up after a failure must not be left with them.
ncclResult_t Group::drop(const char* why) {
  std::vector<Job> jobs = std::move(jobs_);
  clear();
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
  bool background = mode_ == Mode::NonBlocking && !jobs.empty();
  clear();
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
  return group.add(std::move(call));
}

ncclResult_t submit(Job job) {
  Group& group = this_thread_group();
  try {
    if (group.depth > 0) {
      ncclResult_t r = group.add(job);
      if (r != ncclSuccess) cancel(job, last_error());
      return r;
    }
    if (!job.blocking) return run_in_background({job}, {});
  } catch (...) {
    cancel(job, "its creation could not be started");
    throw;
  }
  Outcome outcome = run_guarded(job);
  if (outcome.code != ncclSuccess) set_last_error(outcome.text);
  return outcome.code;
}

ncclResult_t spoil(ncclResult_t code) {
  Group& group = this_thread_group();
  if (group.depth > 0 && code != ncclSuccess && code != ncclInProgress) group.spoil(code);
  return code;
}

}  // namespace pncpu
