#include "calls/group.hpp"

#include <algorithm>
#include <condition_variable>

#include "base/threads.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

std::string copy_of_last_error() noexcept {
  try {
    return last_error();
  } catch (const std::bad_alloc&) {
    return "out of memory";  // fits without an allocation
  }
}

// Drops what the job holds while the last error says why it failed (Meeting).
ErrorReport run_guarded(Job& job) noexcept {
  ErrorReport outcome;
  outcome.code = guarded(job.function, [&] {
    bool begun = true;
    for (auto& creation : job.creates) begun = creation->begin() && begun;
    if (!begun)
      return fail(ncclInvalidUsage, "a communicator of the group was aborted before the group ended");
    return job.run();
  });
  if (outcome.code.failed() && outcome.code.result != ncclInProgress) {
    outcome.code = last_error_as(outcome.code.result);
    outcome.text = copy_of_last_error();
    outcome.late = late_ranks();
  }
  job.run = nullptr;
  for (auto& creation : job.creates) creation->end(outcome.code, outcome.text, outcome.late);
  return outcome;
}

// Runs jobs concurrently, each in a thread. Runs none if a thread cannot be started: the ranks of one
// communicator wait for each other.
class Together {
 public:
  explicit Together(std::vector<Job> jobs)
      : jobs_(std::move(jobs)), outcomes_(jobs_.size()), failed_(jobs_.size()) {}

  ErrorReport run() {
    if (jobs_.size() == 1) return run_guarded(jobs_[0]);
    std::exception_ptr no_thread;
    try {
      for (; started_ < jobs_.size(); ++started_)
        start_thread("a communicator of the group", [this, i = started_, caller = this_caller()] {
          this_caller() = caller;
          work(i);
        });
    } catch (...) {
      no_thread = std::current_exception();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    go_ = no_thread ? Go::Never : Go::Now;
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ == started_; });
    if (no_thread) std::rethrow_exception(no_thread);
    return failed_ < jobs_.size() ? std::move(outcomes_[failed_]) : ErrorReport();
  }

 private:
  enum class Go { Wait, Now, Never };
  void work(size_t i) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return go_ != Go::Wait; });
    if (go_ == Go::Now) {
      lock.unlock();
      ErrorReport outcome = run_guarded(jobs_[i]);
      lock.lock();
      if (outcome.code.failed() && failed_ == jobs_.size()) failed_ = i, stop_creations();
      outcomes_[i] = std::move(outcome);
    }
    ++done_;
    changed_.notify_all();
  }
  // As in NCCL (src/group.cc: groupLaunch) the other jobs do not wait for a rank that failed.
  void stop_creations() {
    for (const Job& job : jobs_)
      for (auto& creation : job.creates) creation->comm()->session.stop_creation();
  }
  std::vector<Job> jobs_;
  std::vector<ErrorReport> outcomes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Go go_ = Go::Wait;
  size_t started_ = 0, done_ = 0, failed_;  // the first that failed, else the number of jobs
};

void cancel(const std::vector<Job>& jobs, const char* why) noexcept {
  for (const Job& job : jobs)
    for (auto& creation : job.creates) creation->end(ncclInvalidUsage, why);
}

// Jobs run before calls, as in NCCL: a group may have a split and a collective on its parent.
ncclResult_t run_all(std::vector<Job> jobs, std::vector<Submission> calls) {
  if (!jobs.empty()) {
    ErrorReport outcome = Together(std::move(jobs)).run();
    if (outcome.code.failed()) {
      set_last_error(outcome.code, outcome.text, outcome.late);
      return outcome.code.result;
    }
  }
  return calls.empty() ? ncclSuccess : issue({calls.data(), calls.size()});
}

// Keeps communicators in the state ncclInProgress until a background operation has ended, in whatever way.
class Background {
 public:
  explicit Background(std::vector<std::shared_ptr<Comm>> comms) {
    comms_.reserve(comms.size());
    for (auto& comm : comms) {
      uint64_t ticket = comm->comm_state.begin_background();
      comms_.emplace_back(std::move(comm), ticket);
    }
  }
  ~Background() {
    for (auto& [comm, ticket] : comms_) {
      if (code_.failed() && comm->error() == ncclSuccess) comm->fail_with(code_, text_, false);
      comm->comm_state.end_background(ticket, code_.result);
    }
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  void ended(ncclResult_t result) noexcept {
    code_ = result == ncclInProgress ? ncclSuccess : result;
    if (!code_.failed()) return;
    code_ = last_error_as(result);
    text_ = copy_of_last_error();
  }

 private:
  std::vector<std::pair<std::shared_ptr<Comm>, uint64_t>> comms_;
  ErrorCode code_ = ncclSystemError;
  std::string text_ = "the background operation could not be started";
};

ncclResult_t run_in_background(std::vector<Job> jobs, std::vector<Submission> calls) {
  std::vector<std::shared_ptr<Comm>> comms;
  for (const Job& job : jobs)
    if (job.comm) comms.push_back(job.comm);
  for (const Submission& call : calls) comms.push_back(call.comm);
  auto goes_on = std::make_unique<Background>(std::move(comms));
  // The caller does not wait.
  const Caller caller{this_caller().thread, true};
  auto body = [jobs = std::move(jobs), calls = std::move(calls), goes_on = std::move(goes_on),
               caller]() mutable {
    this_caller() = caller;
    goes_on->ended(guarded("ncclGroupEnd", [&] { return run_all(std::move(jobs), std::move(calls)); }));
  };
  start_thread("the background operation of a non-blocking communicator", std::move(body));
  return ncclInProgress;
}

}  // namespace

Group& this_thread_group() {
  static thread_local Group group;
  group.abandon();
  return group;
}

Group::~Group() { abandon(); }

void Group::abandon() noexcept {
  if (epoch_ == process_epoch()) return;
  new (parents_calls_) std::vector<Submission>(std::move(calls_));
  new (parents_jobs_) std::vector<Job>(std::move(jobs_));
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

// As in NCCL's src/group.cc (ncclAsyncLaunch).
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

// A destruction blocks, so its group does.
ncclResult_t Group::add(Job job) {
  if (job.ends)
    mode_ = Mode::Blocking;
  else if (ncclResult_t r = join(job.blocking); r != ncclSuccess)
    return r;
  jobs_.push_back(std::move(job));
  for (auto& creation : jobs_.back().creates) creation->give_out();
  return ncclSuccess;
}

void Group::spoil(ncclResult_t code) noexcept {
  if (error_.failed()) return;
  error_ = last_error_as(code);
  error_text_ = copy_of_last_error();
}

int Group::copies_on(int device) const {
  int count = 0;
  for (const Job& job : jobs_)
    for (auto& creation : job.creates) count += creation->comm()->device == device;
  return count;
}

// Jobs that end communicators run all the same: a program that cleans up after a failure depends on them.
ncclResult_t Group::drop(const char* why) {
  std::vector<Job> jobs = std::move(jobs_);
  clear();
  auto ends = std::stable_partition(jobs.begin(), jobs.end(), [](const Job& job) { return !job.ends; });
  std::vector<Job> ending(ends, jobs.end());
  jobs.erase(ends, jobs.end());
  cancel(jobs, why);
  jobs.clear();
  return ending.empty() ? ncclSuccess : run_all(std::move(ending), {});
}

ncclResult_t Group::finish() {
  if (error_.failed()) {
    ErrorCode code = error_;
    std::string text = std::move(error_text_);
    set_last_error(code, text);
    drop("the group that was to create it failed");
    set_last_error(code, text);
    return code.result;
  }
  std::vector<Submission> calls = std::move(calls_);
  std::vector<Job> jobs = std::move(jobs_);
  bool background = mode_ == Mode::NonBlocking && !jobs.empty();
  clear();
  return background ? run_in_background(std::move(jobs), std::move(calls))
                    : run_all(std::move(jobs), std::move(calls));
}

// For a machine that moves 5 GB/s and needs 5 us per call.
ncclResult_t Group::simulate(float* microseconds) {
  *microseconds = -1.0f;
  for (const Submission& call : calls_)
    *microseconds = 5.0f + float(double(call.op.bytes()) * call.comm->nranks / 5000.0);
  ncclResult_t spoiled = error_.result;
  const char* why = "the group that was to create it was only simulated";
  // Ranks that do not simulate their group hear the last error (Meeting).
  if (spoiled == ncclSuccess && !jobs_.empty()) set_last_error(ncclInvalidUsage, why);
  ncclResult_t r = drop(why);
  return spoiled != ncclSuccess ? spoiled : r;
}

ncclResult_t submit(Submission call) {
  Group& group = this_thread_group();
  if (group.depth == 0) return issue({&call, 1});
  return group.add(std::move(call));
}

ncclResult_t submit(Job job) {
  Group& group = this_thread_group();
  if (group.depth > 0) return group.add(std::move(job));
  if (!job.blocking) return run_in_background({std::move(job)}, {});
  ErrorReport outcome = run_guarded(job);
  if (outcome.code.failed()) set_last_error(outcome.code, outcome.text, outcome.late);
  return outcome.code.result;
}

ncclResult_t spoil(ncclResult_t code) noexcept {
  Group& group = this_thread_group();
  if (group.depth > 0 && code != ncclSuccess && code != ncclInProgress) group.spoil(code);
  return code;
}

}  // namespace pncpu
