#include "streams/group.hpp"

#include <algorithm>
#include <thread>

namespace pncpu {
namespace {

ncclResult_t run_in_background(Job job) {
  job.comm->set_pending(ncclInProgress);
  std::thread([job] {
    ncclResult_t r = job.run();
    if (r != ncclSuccess && job.comm->error() == ncclSuccess) job.comm->fail_with(r, last_error(), false);
    job.comm->set_pending(r);
  }).detach();
  return ncclInProgress;
}

ncclResult_t run_jobs(std::vector<Job> jobs) {
  ncclResult_t result = ncclSuccess;
  if (jobs.size() == 1 && jobs[0].blocking) return jobs[0].run();
  std::vector<std::thread> threads;
  std::vector<std::pair<ncclResult_t, std::string>> results(jobs.size(), {ncclSuccess, ""});
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!jobs[i].blocking) {
      result = run_in_background(std::move(jobs[i]));
      continue;
    }
    threads.emplace_back([&, i] {
      results[i].first = jobs[i].run();
      if (results[i].first != ncclSuccess) results[i].second = last_error();
    });
  }
  for (std::thread& t : threads) t.join();
  for (auto& [code, text] : results) {
    if (code == ncclSuccess) continue;
    set_last_error(text);
    return code;
  }
  return result;
}

}  // namespace

Group& this_thread_group() {
  static thread_local Group group;
  return group;
}

void Group::clear() {
  ops.clear();
  jobs.clear();
  error = ncclSuccess;
}

ncclResult_t Group::finish() {
  std::vector<Op> issued = std::move(ops);
  std::vector<Job> run = std::move(jobs);
  ncclResult_t spoiled = error;
  clear();
  if (spoiled != ncclSuccess) return spoiled;
  if (!issued.empty() && !run.empty())
    return fail(ncclInvalidUsage,
                "a group holds both communication and calls that create or end communicators");
  if (!run.empty()) return run_jobs(std::move(run));
  return issued.empty() ? ncclSuccess : issued.size() == 1 ? issue_one(issued[0]) : issue(std::move(issued));
}

ncclResult_t submit(const Op& op) {
  Group& group = this_thread_group();
  if (group.depth == 0) return issue_one(op);
  group.ops.push_back(op);
  return ncclSuccess;
}

ncclResult_t submit(Job job) {
  Group& group = this_thread_group();
  if (group.depth > 0) {
    bool in_progress = !job.blocking;
    group.jobs.push_back(std::move(job));
    return in_progress ? ncclInProgress : ncclSuccess;
  }
  return job.blocking ? job.run() : run_in_background(std::move(job));
}

ncclResult_t spoil(ncclResult_t code) {
  Group& group = this_thread_group();
  if (group.depth > 0 && group.error == ncclSuccess && code != ncclInProgress) group.error = code;
  return code;
}

}  // namespace pncpu

using namespace pncpu;

extern "C" {

ncclResult_t ncclGroupStart(void) {
  ++this_thread_group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  Group& group = this_thread_group();
  if (group.depth == 0)
    return fail(ncclInvalidUsage, "ncclGroupEnd: no ncclGroupStart came before it on this thread");
  if (--group.depth > 0) return ncclSuccess;
  return group.finish();
}

// The estimate is that of a machine that moves 5 GB/s and needs 5 us a call; as in NCCL nothing is issued.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  Group& group = this_thread_group();
  if (group.depth == 0)
    return fail(ncclInvalidUsage, "ncclGroupSimulateEnd: no ncclGroupStart came before it");
  if (info && (info->magic != NCCL_SIM_INFO_MAGIC || info->size < sizeof *info))
    return fail(ncclInvalidArgument,
                "ncclGroupSimulateEnd: simInfo is not initialized (magic 0x%x, size %zu)", info->magic,
                info->size);
  if (--group.depth > 0) return ncclSuccess;
  float us = -1.0f;
  for (const Op& op : group.ops) us = 5.0f + float(double(op.bytes()) * op.comm->nranks / 5000.0);
  ncclResult_t spoiled = group.error;
  group.clear();
  if (info) info->estimatedTime = us;
  return spoiled;
}

}  // extern "C"
