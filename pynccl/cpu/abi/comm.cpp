// The C API: creating, splitting, querying and ending communicators. Checks arguments, then delegates.
#include <algorithm>
#include <cstring>
#include <set>

#include "base/device.hpp"
#include "calls/group.hpp"
#include "comm/fault.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

// For calls that derive a communicator: NCCL returns ncclSuccess although they go on in the background. Their
// progress is the state of the parent.
ncclResult_t submit_quietly(Job job) {
  ncclResult_t r = submit(std::move(job));
  return r == ncclInProgress ? ncclSuccess : r;
}

// Checks PYNCCL_CPU_* at each creation: a program may set the variables late.
ncclResult_t check_environment(const char* function) {
  const char* wrong = param_error();
  if (!wrong) wrong = fault_error();
  return wrong ? fail_in(function, ncclInvalidArgument, "%s", wrong) : ncclSuccess;
}

ncclResult_t check_id(const char* function, const char* name, const Id& id) {
  if (id.plausible()) return ncclSuccess;
  return fail_in(
      function, ncclInvalidArgument,
      "%s was not made by ncclGetUniqueId of this library; expected the bytes that one rank got from it",
      name);
}

ncclResult_t submit_init(ncclComm_t* out, int nranks, int rank, const std::vector<Id>& ids, uint64_t ids_hash,
                         const ncclConfig_t* config, const char* function, int device, bool waits = false) {
  if (ncclResult_t r = check_environment(function); r != ncclSuccess) return r;
  show_handle(out, nullptr);
  if (nranks < 1) return fail_in(function, ncclInvalidArgument, "nranks is %d, expected at least 1", nranks);
  for (const Id& id : ids)
    if (ncclResult_t r = check_id(function, "commId", id); r != ncclSuccess) return r;
  Config settings;
  if (ncclResult_t r = read_config(config, function, &settings); r != ncclSuccess) return r;
  // The root hears of a wrong rank, too, so that it can tell the other ranks.
  std::shared_ptr<Domain> domain = Domain::of(device, this_thread_group().copies_on(device));
  std::shared_ptr<Comm> comm = make_comm(rank, nranks, device, std::move(domain), settings);
  Job job{function, [=] { return init(comm, ids, ids_hash); }, comm, {}, comm->blocking || waits};
  job.creates = {std::make_shared<Creation>(comm, out, Creation::Shows::AtOnce, job.blocking)};
  return submit(std::move(job));
}

// One job creates all ranks. If they are non-blocking each is created in the background and has its own
// state.
ncclResult_t submit_init_all(ncclComm_t* out, int ndev, const int* devices) {
  const char* function = "ncclCommInitAll";
  if (ncclResult_t r = check_environment(function); r != ncclSuccess) return r;
  Config settings;
  if (ncclResult_t r = read_config(nullptr, function, &settings); r != ncclSuccess) return r;
  if (!settings.blocking) {
    Id id;
    if (ncclResult_t r = make_id(&id, true); r != ncclSuccess) return r;
    ncclGroupStart();
    for (int i = 0; i < ndev; ++i)
      spoil(submit_init(&out[i], ndev, i, {id}, 0, nullptr, function, devices ? devices[i] : i));
    return ncclGroupEnd();
  }
  std::vector<std::shared_ptr<Comm>> comms;
  std::map<int, int> copies;
  for (int i = 0; i < ndev; ++i) {
    int device = devices ? devices[i] : i;
    comms.push_back(make_comm(i, ndev, device, Domain::of(device, copies[device]++), settings));
  }
  Job job{function, [comms] { return init_all(comms); }};
  for (int i = 0; i < ndev; ++i)
    job.creates.push_back(
        std::make_shared<Creation>(comms[size_t(i)], &out[i], Creation::Shows::AtOnce, true));
  return submit(std::move(job));
}

ncclResult_t check_devices(const int* devices, int ndev, const char* function) {
  std::map<int, int> owners;
  for (int i = 0; i < ndev; ++i) {
    int device = devices ? devices[i] : i;
    std::string what = devices ? "devlist[" + std::to_string(i) + "]" : "a device without devlist";
    if (ncclResult_t r = check_device(device, function, what.c_str()); r != ncclSuccess) return r;
    int owner = owners.emplace(device, i).first->second;
    if (owner != i && shared_devices() && !sharing_allowed())
      return fail_in(function, ncclInvalidUsage,
                     "devlist[%d] and devlist[%d] are both device %d: set NCCL_MULTI_RANK_GPU_ENABLE=1 to "
                     "share one",
                     owner, i, device);
  }
  return ncclSuccess;
}

Id id_of(const ncclUniqueId& bytes) {
  Id id;
  memcpy(static_cast<void*>(&id), bytes.internal, sizeof id);
  return id;
}

ncclResult_t write_id(const Id& id, ncclUniqueId* out) {
  memset(out->internal, 0, sizeof out->internal);
  memcpy(out->internal, &id, sizeof id);
  return ncclSuccess;
}

// A communicator to be derived: its parent exchanges data before the child's rank and size are known.
struct Child {
  std::shared_ptr<Comm> parent, comm;
};

ncclResult_t make_child(const std::shared_ptr<Comm>& parent, const ncclConfig_t* config, const char* function,
                        Child* child) {
  Config settings;
  settings.blocking = parent->blocking;
  settings.name = parent->name;
  if (ncclResult_t r = read_config(config, function, &settings); r != ncclSuccess) return r;
  *child = {parent, make_comm(0, 1, parent->device, parent->domain, settings)};
  return ncclSuccess;
}

// Communicators of a split or shrink get their handle when they are complete (src/init.cc:
// ncclCommInitChildComm). The parent's state shows the progress.
std::shared_ptr<Creation> creation_of(const Child& child, ncclComm_t* out) {
  auto creation =
      std::make_shared<Creation>(child.comm, out, Creation::Shows::WhenComplete, child.parent->blocking);
  creation->derives_from(child.parent);
  return creation;
}

// Connects the parent's ranks that form the child, in the order of `members`.
ncclResult_t connect_child(Child& child, const std::vector<std::pair<int, PeerInfo>>& members,
                           const Meeting& meeting) {
  std::vector<PeerInfo> table;
  Comm::Members expected;
  int rank = 0;
  for (auto& [r, info] : members) {
    if (r == child.parent->rank) rank = int(table.size());
    table.push_back(info);
    child.comm->parent_ranks.push_back(r);
    size_t at =
        size_t(std::find(meeting.ranks().begin(), meeting.ranks().end(), r) - meeting.ranks().begin());
    expected[r] = meeting.tags()[at];
  }
  child.comm->session.set_shape(rank, int(table.size()));
  child.parent->connects(*child.comm, expected);
  return child.parent->explain(connect(*child.comm, Table::of(std::move(table))), expected);
}

struct SplitBlob {
  int32_t color, key;
  PeerInfo info;
};

// The ranks with this color, in the order of their keys.
std::vector<std::pair<int, PeerInfo>> members_of(int color, const std::vector<std::string>& blobs) {
  std::vector<std::pair<std::pair<int, int>, PeerInfo>> sorted;
  for (int q = 0; q < int(blobs.size()); ++q) {
    SplitBlob theirs;
    memcpy(static_cast<void*>(&theirs), blobs[size_t(q)].data(), sizeof theirs);
    if (theirs.color == color) sorted.push_back({{theirs.key, q}, theirs.info});
  }
  std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<std::pair<int, PeerInfo>> members;
  for (auto& [order, info] : sorted) members.push_back({order.second, info});
  return members;
}

ncclResult_t run_split(Child child, int color, int key, const Meeting& meeting) {
  if (ncclResult_t r = child.comm->session.introduce(); r != ncclSuccess) return r;
  SplitBlob mine{color, key, child.comm->session.self};
  std::vector<std::string> all;
  ncclResult_t r = meeting.meet(std::string(reinterpret_cast<char*>(&mine), sizeof mine), &all);
  return r == ncclSuccess ? connect_child(child, members_of(color, all), meeting) : r;
}

// The part of a rank that joins no child.
ncclResult_t stay_out(int color, int key, const Meeting& meeting) {
  SplitBlob mine{color, key, {}};
  std::vector<std::string> all;
  return meeting.meet(std::string(reinterpret_cast<char*>(&mine), sizeof mine), &all);
}

// A rank's part in the exchange of ncclCommShrink: how it can be reached, then the ranks that it excludes.
ncclResult_t run_shrink(Child child, const std::set<int>& excluded, const Meeting& meeting) {
  if (ncclResult_t r = child.comm->session.introduce(); r != ncclSuccess) return r;
  std::string mine(reinterpret_cast<char*>(&child.comm->session.self), sizeof(PeerInfo));
  for (int q : excluded) mine += (mine.size() > sizeof(PeerInfo) ? ", " : "") + std::to_string(q);
  std::vector<std::string> all, calls;
  if (ncclResult_t r = meeting.meet(mine, &all); r != ncclSuccess) return r;
  std::vector<std::pair<int, PeerInfo>> members;
  for (size_t i = 0; i < all.size(); ++i) {
    members.push_back({meeting.ranks()[i], {}});
    memcpy(static_cast<void*>(&members.back().second), all[i].data(),
           std::min(all[i].size(), sizeof(PeerInfo)));
    calls.push_back("without ranks [" + all[i].substr(std::min(all[i].size(), sizeof(PeerInfo))) + "]");
  }
  if (ncclResult_t r = meeting.agree(calls); r != ncclSuccess) return r;
  return connect_child(child, members, meeting);
}

struct GrowBlob {
  enum Has : int32_t { None, Made, Passed };
  int32_t nranks, has;
  Id id;
};

// The id that one rank passed. If no rank did and there are several, the id that one of them made: NCCL's
// ncclCommGetUniqueId tells another rank (src/init.cc: bcastGrowHandle).
ncclResult_t choose_id(const std::vector<GrowBlob>& all, Id* chosen) {
  int count[] = {0, 0, 0};
  for (const GrowBlob& theirs : all) ++count[theirs.has];
  int32_t wanted = count[GrowBlob::Passed] == 0 && all.size() > 1 ? GrowBlob::Made : GrowBlob::Passed;
  if (count[wanted] != 1)
    return fail_in("ncclCommGrow", ncclInvalidUsage,
                   "%d existing ranks passed a uniqueId, expected one: the rank that called "
                   "ncclCommGetUniqueId (pynccl: comm.get_unique_id()), whose id the new ranks join with",
                   count[GrowBlob::Passed]);
  for (const GrowBlob& theirs : all)
    if (theirs.has == wanted) *chosen = theirs.id;
  return ncclSuccess;
}

// A call uses up the id that this rank has made, even if it fails: the new ranks may have joined with it in
// vain.
GrowBlob grow_blob(Comm& parent, int nranks, const ncclUniqueId* passed) {
  std::unique_lock<std::mutex> lock(parent.session.mutex);
  std::unique_ptr<Id> made = std::move(parent.grow_id);
  lock.unlock();
  if (passed) return {nranks, GrowBlob::Passed, id_of(*passed)};
  if (made) return {nranks, GrowBlob::Made, *made};
  return {nranks, GrowBlob::None, Id()};
}

ncclResult_t meet_to_grow(const GrowBlob& mine, const Meeting& meeting, Id* chosen) {
  std::vector<std::string> all;
  ncclResult_t r = meeting.meet(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), &all);
  if (r != ncclSuccess) return r;
  std::vector<GrowBlob> blobs(all.size());
  std::vector<std::string> calls;
  for (size_t q = 0; q < all.size(); ++q) {
    memcpy(static_cast<void*>(&blobs[q]), all[q].data(), sizeof blobs[q]);
    calls.push_back("to " + std::to_string(blobs[q].nranks) + " ranks");
  }
  if (r = meeting.agree(calls); r != ncclSuccess) return r;
  return choose_id(blobs, chosen);
}

// An old rank that has not joined may itself wait for another old rank: it is not named as late.
ncclResult_t blame_new_ranks(int old) {
  const LateRanks all = late_ranks();
  LateRanks late;
  for (int i = 0; i < all.count; ++i)
    if (all.ranks[i] >= old) late.add(all.ranks[i]);
  return blame(late);
}

ncclResult_t run_grow(Child child, const GrowBlob& mine, const Meeting& meeting) {
  Id chosen;
  Session& session = child.comm->session;
  session.set_shape(child.parent->rank, mine.nranks);
  ncclResult_t r = meet_to_grow(mine, meeting, &chosen);
  if (r == ncclSuccess) {
    r = init(child.comm, {chosen}, 0);
    return r == ncclTimeout ? blame_new_ranks(child.parent->session.nranks) : r;
  }
  // New ranks may wait for this one.
  if (r == ncclRemoteError) blame(child.parent->dead_ranks());
  if (mine.has != GrowBlob::None) session.refuse(mine.id);
  return r;
}

// Whether a communicator can be derived from this parent.
ncclResult_t check_parent(const Comm& parent, const char* function) {
  Phase phase = parent.comm_state.phase.load();
  if (phase == Phase::Finalized || phase == Phase::Finalizing)
    return fail_in(function, ncclInvalidUsage, "comm has been finalized");
  if (phase == Phase::Suspended) return fail_in(function, ncclInvalidUsage, "comm is suspended");
  return ncclSuccess;
}

ncclResult_t submit_split(const std::shared_ptr<Comm>& parent, int color, int key, ncclComm_t* newcomm,
                          const ncclConfig_t* config) {
  const char* function = "ncclCommSplit";
  if (ncclResult_t r = check_parent(*parent, function); r != ncclSuccess) return r;
  Meeting meeting(parent, Meeting::everyone(*parent), function);
  REQUIRE_POINTER(function, newcomm);
  show_handle(newcomm, nullptr);
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    return fail_in("ncclCommSplit", ncclInvalidArgument,
                   "color is %d, expected 0 or more or NCCL_SPLIT_NOCOLOR", color);
  Job job{function, {}, parent, {}, parent->blocking};
  if (color == NCCL_SPLIT_NOCOLOR) {
    job.run = [=] { return stay_out(color, key, meeting); };
    return submit_quietly(std::move(job));
  }
  Child child;
  if (ncclResult_t r = make_child(parent, config, function, &child); r != ncclSuccess) return r;
  job.creates = {creation_of(child, newcomm)};
  job.run = [=] { return run_split(child, color, key, meeting); };
  return submit_quietly(std::move(job));
}

ncclResult_t read_excluded(const Comm& parent, const int* list, int count, std::set<int>* excluded) {
  if (count < 1 || count >= parent.nranks)
    return fail_in("ncclCommShrink", ncclInvalidArgument, "excludeRanksCount is %d, expected 1 to %d", count,
                   parent.nranks - 1);
  if (!list) return fail_in("ncclCommShrink", ncclInvalidArgument, "excludeRanksList is NULL");
  for (int i = 0; i < count; ++i) {
    int r = list[i];
    const char* wrong = r == parent.rank              ? "the calling rank itself"
                        : r < 0 || r >= parent.nranks ? "no rank of this communicator"
                        : !excluded->insert(r).second ? "named twice"
                                                      : nullptr;
    if (wrong)
      return fail_in("ncclCommShrink", ncclInvalidArgument, "excludeRanksList[%d] is %d: %s", i, r, wrong);
  }
  return ncclSuccess;
}

ncclResult_t submit_shrink(const std::shared_ptr<Comm>& parent, const std::set<int>& excluded,
                           ncclComm_t* newcomm, const ncclConfig_t* config, int flags) {
  const char* function = "ncclCommShrink";
  if (ncclResult_t r = check_parent(*parent, function); r != ncclSuccess) return r;
  std::vector<int> kept;
  for (int q = 0; q < parent->nranks; ++q)
    if (!excluded.count(q)) kept.push_back(q);
  const bool abort = flags & NCCL_SHRINK_ABORT;
  Meeting meeting(parent, std::move(kept), function, abort);
  REQUIRE_POINTER(function, newcomm);
  show_handle(newcomm, nullptr);
  if (flags & ~NCCL_SHRINK_ABORT)
    return fail_in("ncclCommShrink", ncclInvalidArgument, "shrinkFlags is 0x%x", unsigned(flags));
  if (abort && !parent->comm_state.revoked.exchange(true))
    parent->stop_calls("stopped by ncclCommShrink with NCCL_SHRINK_ABORT");
  parent->drain(kForever);
  Child child;
  if (ncclResult_t r = make_child(parent, config, function, &child); r != ncclSuccess) return r;
  Job job{function, {}, parent, {creation_of(child, newcomm)}, parent->blocking};
  job.run = [=] { return run_shrink(child, excluded, meeting); };
  return submit_quietly(std::move(job));
}

ncclResult_t submit_grow(const std::shared_ptr<Comm>& parent, int nranks, const ncclUniqueId* uniqueId,
                         int rank, ncclComm_t* newcomm, const ncclConfig_t* config) {
  const char* function = "ncclCommGrow";
  if (ncclResult_t r = check_parent(*parent, function); r != ncclSuccess) return r;
  Meeting meeting(parent, Meeting::everyone(*parent), function);
  GrowBlob mine = grow_blob(*parent, nranks, uniqueId);
  REQUIRE_POINTER(function, newcomm);
  show_handle(newcomm, nullptr);
  if (rank != -1)
    return fail_in("ncclCommGrow", ncclInvalidArgument, "rank is %d, expected -1 from a rank that exists",
                   rank);
  if (nranks <= parent->nranks)
    return fail_in("ncclCommGrow", ncclInvalidArgument, "nRanks is %d, expected more than the %d there are",
                   nranks, parent->nranks);
  Child child;
  if (ncclResult_t r = make_child(parent, config, function, &child); r != ncclSuccess) return r;
  Job job{function, {}, child.comm, {}, child.comm->blocking};
  job.creates = {std::make_shared<Creation>(child.comm, newcomm, Creation::Shows::AtOnce, job.blocking)};
  job.run = [=] { return run_grow(child, mine, meeting); };
  return submit_quietly(std::move(job));
}

// Under the issue lock, so that no call is issued after it.
ncclResult_t begin_finalize(Comm& comm) {
  std::lock_guard<std::mutex> lock(issue_lock());
  if (ncclResult_t r = check_ready(comm, "ncclCommFinalize"); r != ncclSuccess) return r;
  if (comm.comm_state.revoked.load())
    return spoil_state(comm, fail_in("ncclCommFinalize", ncclInvalidArgument, "comm has been revoked"));
  Phase ready = Phase::Ready;
  if (!comm.comm_state.phase.compare_exchange_strong(ready, Phase::Finalizing))
    return spoil_state(comm, fail_in("ncclCommFinalize", ncclInvalidArgument,
                                     "comm has been finalized already, or is suspended"));
  return ncclSuccess;
}

ncclResult_t submit_finalize(const std::shared_ptr<Comm>& comm) {
  if (ncclResult_t r = begin_finalize(*comm); r != ncclSuccess) return r;
  return submit(Job{"ncclCommFinalize", [comm] { return finalize(*comm); }, comm, {}, comm->blocking});
}

// A failed communicator can be destroyed; a communicator with a call in progress cannot.
ncclResult_t check_may_end(Comm& comm, CommState::End how, const char* function) {
  bool polled = comm.error() != ncclSuccess || !comm.comm_state.must_poll();
  bool in_progress = comm.comm_state.pending() == ncclInProgress || !polled;
  return how == CommState::End::Destroy && !comm.blocking && in_progress ? check_ready(comm, function)
                                                                         : ncclSuccess;
}

ncclResult_t submit_end(ncclComm_t handle, CommState::End how, const char* function) {
  std::shared_ptr<Comm> comm = find_handle<Comm>(handle, function);
  if (!comm) return ncclInvalidArgument;
  std::shared_ptr<Ending> ending;
  {
    std::lock_guard<std::mutex> lock(issue_lock());
    if (ncclResult_t r = check_may_end(*comm, how, function); r != ncclSuccess) return r;
    ending = std::make_shared<Ending>(comm, how);
  }
  if (!ending->may_run()) return refuse_handle<Comm>(handle, function);
  return submit(Job{function, [ending] { return ending->run(); }, nullptr, {}, true, true});
}

// As in NCCL the communicator need not be ready, and a second revoke is an error (src/init.cc:
// ncclCommRevoke).
ncclResult_t begin_revoke(Comm& comm, int flags) {
  const char* function = "ncclCommRevoke";
  if (flags != NCCL_REVOKE_DEFAULT)
    return fail_in(function, ncclInvalidArgument, "revokeFlags is %d, expected NCCL_REVOKE_DEFAULT", flags);
  std::lock_guard<std::mutex> lock(issue_lock());
  Phase phase = comm.comm_state.phase.load();
  if (phase == Phase::Finalizing || phase == Phase::Finalized)
    return fail_in(function, ncclInvalidArgument, "comm has been finalized");
  if (comm.comm_state.revoked.exchange(true))
    return fail_in(function, ncclInvalidArgument, "comm has been revoked already");
  return ncclSuccess;
}

ncclResult_t revoke(ncclComm_t handle, int flags) {
  std::shared_ptr<Comm> comm;
  if (ncclResult_t r = any_comm_of(handle, "ncclCommRevoke", &comm); r != ncclSuccess) return r;
  if (ncclResult_t r = begin_revoke(*comm, flags); r != ncclSuccess) return r;
  std::string why = "rank " + std::to_string(comm->rank) + " revoked its communicator";
  if (comm->stop_calls(why)) comm->tell(ncclInvalidUsage, why);
  auto run = [comm] {
    ncclResult_t r = comm->drain(kForever);
    comm->close_buffers();
    return r;
  };
  return submit(Job{"ncclCommRevoke", run, comm, {}, comm->blocking});
}

// Queries a communicator that is ready.
template <class Get>
ncclResult_t ask(const char* function, const char* what, ncclComm_t handle, int* out, Get get) noexcept {
  return guarded(function, [&] {
    std::shared_ptr<Comm> comm;
    if (ncclResult_t r = comm_of(handle, function, &comm); r != ncclSuccess) return r;
    if (!out) return fail_in(function, ncclInvalidArgument, "%s is NULL", what);
    *out = get(*comm);
    return ncclSuccess;
  });
}

// Queries any communicator for what it knows of a rank.
template <class Get>
ncclResult_t ask_of(const char* function, const char* what, ncclComm_t handle, int rank, int* out,
                    Get get) noexcept {
  return guarded(function, [&] {
    std::shared_ptr<Comm> comm;
    if (ncclResult_t r = any_comm_of(handle, function, &comm); r != ncclSuccess) return r;
    if (!out) return fail_in(function, ncclInvalidArgument, "%s is NULL", what);
    int known = comm->session.known_ranks();
    if (rank < 0 || rank >= known)
      return fail_in(function, ncclInvalidArgument, "rank is %d, expected 0 to %d", rank, known - 1);
    *out = get(*comm);
    return ncclSuccess;
  });
}

// The last error of a communicator, or of this thread.
ErrorCode error_code_of(ncclComm_t comm) {
  std::shared_ptr<Comm> c = comm ? handles<Comm>().find(comm) : nullptr;
  ErrorCode code = c ? c->report().code : ErrorCode();
  return code.failed() ? code : last_error_code();
}

}  // namespace

}  // namespace pncpu

using namespace pncpu;

extern "C" {

ncclResult_t pyncclCpuDeviceCount(int* count) {
  return guarded("pyncclCpuDeviceCount", [&] {
    REQUIRE_POINTER("pyncclCpuDeviceCount", count);
    int64_t devices = param_int("PYNCCL_CPU_DEVICES"), local = param_int("LOCAL_WORLD_SIZE");
    *count = int(devices > 0 ? devices : local > 0 ? local : 1);
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuHostId(uint64_t* host) {
  return guarded("pyncclCpuHostId", [&] {
    REQUIRE_POINTER("pyncclCpuHostId", host);
    *host = host_id();
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuSetDevice(int device) {
  return guarded("pyncclCpuSetDevice", [&] {
    if (ncclResult_t r = check_device(device, "pyncclCpuSetDevice", "device"); r != ncclSuccess) return r;
    set_default_device(device);
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuGetDevice(int* device) {
  REQUIRE_POINTER("pyncclCpuGetDevice", device);
  *device = default_device();
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  return guarded("ncclGetUniqueId", [&] {
    REQUIRE_POINTER("ncclGetUniqueId", uniqueId);
    Id id;
    if (ncclResult_t r = make_id(&id, true); r != ncclSuccess) return r;
    return write_id(id, uniqueId);
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  const char* function = "ncclCommInitRankConfig";
  return in_group(function, [&] {
    REQUIRE_POINTER(function, comm);
    return submit_init(comm, nranks, rank, {id_of(commId)}, 0, config, function, default_device());
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  const char* function = "ncclCommInitRank";
  return in_group(function, [&] {
    REQUIRE_POINTER(function, comm);
    // Outside a group it blocks, also with NCCL_COMM_BLOCKING=0 (src/group.cc: ncclAsyncLaunch).
    bool waits = this_thread_group().depth == 0;
    return submit_init(comm, nranks, rank, {id_of(commId)}, 0, nullptr, function, default_device(), waits);
  });
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId* commIds, ncclConfig_t* config) {
  const char* function = "ncclCommInitRankScalable";
  return in_group(function, [&] {
    REQUIRE_POINTER(function, newcomm);
    REQUIRE_POINTER(function, commIds);
    if (nId < 1 || nId > nranks)
      return fail_in(function, ncclInvalidArgument, "nId is %d, expected 1 to nranks %d", nId, nranks);
    Token hash = Token::of(std::string(reinterpret_cast<char*>(commIds), size_t(nId) * sizeof *commIds));
    std::vector<Id> ids;
    for (int i = 0; i < nId; ++i) ids.push_back(id_of(commIds[i]));
    return submit_init(newcomm, nranks, myrank, ids, nId > 1 ? hash.a : 0, config, function,
                       default_device());
  });
}

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  const char* function = "ncclCommInitAll";
  return in_group(function, [&] {
    REQUIRE_POINTER(function, comm);
    if (ndev < 1) return fail_in(function, ncclInvalidArgument, "ndev is %d, expected at least 1", ndev);
    if (ncclResult_t r = check_devices(devlist, ndev, function); r != ncclSuccess) return r;
    if (ndev > kMostLocalRanks)
      return fail_in(
          function, ncclSystemError,
          "ndev is %d, more ranks than the %d of one host for which there is memory: it grows with "
          "their square",
          ndev, kMostLocalRanks);
    return submit_init_all(comm, ndev, devlist);
  });
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return in_group("ncclCommSplit", [&] {
    std::shared_ptr<Comm> parent;
    if (ncclResult_t r = comm_of(comm, "ncclCommSplit", &parent); r != ncclSuccess) return r;
    return submit_split(parent, color, key, newcomm, config);
  });
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags) {
  return in_group("ncclCommShrink", [&] {
    std::shared_ptr<Comm> parent;
    bool abort = shrinkFlags & NCCL_SHRINK_ABORT;
    ncclResult_t r = (abort ? any_comm_of : comm_of)(comm, "ncclCommShrink", &parent);
    if (r != ncclSuccess) return r;
    std::set<int> excluded;
    r = read_excluded(*parent, excludeRanksList, excludeRanksCount, &excluded);
    if (r != ncclSuccess) return r;
    return submit_shrink(parent, excluded, newcomm, config, shrinkFlags);
  });
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId) {
  const char* function = "ncclCommGetUniqueId";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, function, &c); r != ncclSuccess) return r;
    REQUIRE_POINTER(function, uniqueId);
    if (param_is_set("NCCL_COMM_ID"))
      return fail_in(function, ncclInvalidUsage, "NCCL_COMM_ID is set, which is the id of all communicators");
    auto id = std::make_unique<Id>();
    if (ncclResult_t r = make_id(id.get(), false); r != ncclSuccess) return r;
    std::lock_guard<std::mutex> lock(c->session.mutex);
    if (c->grow_id)
      return fail_in(function, ncclInvalidUsage,
                     "the id made before has not been used by ncclCommGrow yet; expected a "
                     "call with that id");
    c->grow_id = std::move(id);
    return write_id(*c->grow_id, uniqueId);
  });
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
                          ncclComm_t* newcomm, ncclConfig_t* config) {
  const char* function = "ncclCommGrow";
  return in_group(function, [&] {
    if (!comm) {
      REQUIRE_POINTER(function, newcomm);
      REQUIRE_POINTER(function, uniqueId);
      return submit_init(newcomm, nRanks, rank, {id_of(*uniqueId)}, 0, config, function, default_device());
    }
    std::shared_ptr<Comm> parent;
    if (ncclResult_t r = comm_of(comm, function, &parent); r != ncclSuccess) return r;
    return submit_grow(parent, nRanks, uniqueId, rank, newcomm, config);
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  return in_group("ncclCommFinalize", [&] {
    std::shared_ptr<Comm> c;
    ncclResult_t r = any_comm_of(comm, "ncclCommFinalize", &c);
    return r == ncclSuccess ? submit_finalize(c) : r;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  return in_group("ncclCommDestroy",
                  [&] { return submit_end(comm, CommState::End::Destroy, "ncclCommDestroy"); });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  return in_group("ncclCommAbort", [&] { return submit_end(comm, CommState::End::Abort, "ncclCommAbort"); });
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
  if (!comm) return ncclSuccess;
  return in_group("ncclCommRevoke", [&] { return revoke(comm, revokeFlags); });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  return guarded("ncclCommGetAsyncError", [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, "ncclCommGetAsyncError", &c); r != ncclSuccess) return r;
    REQUIRE_POINTER("ncclCommGetAsyncError", asyncError);
    // A revoked communicator has no error: it can be split, shrunk and destroyed.
    // A creation that fails has an error a moment before it ends, and before its communicator can be
    // destroyed.
    bool creating = c->comm_state.is_being_created();
    bool broken = c->error() != ncclSuccess && !c->comm_state.revoked.load() && !creating;
    *asyncError = broken ? c->error() : c->comm_state.poll();
    return ncclSuccess;
  });
}

const char* ncclGetLastError(ncclComm_t comm) {
  guarded("ncclGetLastError", [&] {
    std::shared_ptr<Comm> c = comm ? handles<Comm>().find(comm) : nullptr;
    const ErrorReport error = c ? c->report() : ErrorReport();
    if (error.code.failed()) set_last_error(error.code, error.text, error.late);
    return ncclSuccess;
  });
  return last_error();
}

ncclResult_t pyncclCpuGetErrorKind(ncclComm_t comm, int* kind) {
  return guarded("pyncclCpuGetErrorKind", [&] {
    REQUIRE_POINTER("pyncclCpuGetErrorKind", kind);
    *kind = int(error_code_of(comm).mismatch);
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuGetErrorPrefix(ncclComm_t comm, int* functionBytes, int* placeBytes) {
  return guarded("pyncclCpuGetErrorPrefix", [&] {
    REQUIRE_POINTER("pyncclCpuGetErrorPrefix", functionBytes);
    REQUIRE_POINTER("pyncclCpuGetErrorPrefix", placeBytes);
    const ErrorCode code = error_code_of(comm);
    *functionBytes = code.function;
    *placeBytes = code.place;
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuIsErrorReported(ncclComm_t comm, int* reported) {
  return guarded("pyncclCpuIsErrorReported", [&] {
    REQUIRE_POINTER("pyncclCpuIsErrorReported", reported);
    *reported = error_code_of(comm).reported;
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuGetLateRank(int index, int* rank) {
  return guarded("pyncclCpuGetLateRank", [&] {
    REQUIRE_POINTER("pyncclCpuGetLateRank", rank);
    const LateRanks late = late_ranks();
    *rank = index >= 0 && index < late.count ? late.ranks[index] : -1;
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuRefuseToGrow(ncclComm_t comm, const ncclUniqueId* uniqueId, ncclResult_t result,
                                   const char* why, const int* lateRanks, int lateRanksCount) {
  const char* function = "pyncclCpuRefuseToGrow";
  return guarded(function, [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = any_comm_of(comm, function, &c); r != ncclSuccess) return r;
    REQUIRE_POINTER(function, why);
    REQUIRE_POINTER(function, lateRanks);
    if (result <= ncclSuccess || result >= ncclNumResults)
      return fail_in(function, ncclInvalidArgument, "result is %d, expected an error, 1 to %d", result,
                     ncclNumResults - 1);
    if (lateRanksCount < 0)
      return fail_in(function, ncclInvalidArgument, "lateRanksCount is %d, expected 0 or more",
                     lateRanksCount);
    if (uniqueId)
      if (ncclResult_t r = check_id(function, "uniqueId", id_of(*uniqueId)); r != ncclSuccess) return r;
    LateRanks late;
    for (int i = 0; i < lateRanksCount; ++i) {
      if (lateRanks[i] < 0 || lateRanks[i] >= c->nranks)
        return fail_in(function, ncclInvalidArgument, "lateRanks[%d] is %d, expected a rank, 0 to %d", i,
                       lateRanks[i], c->nranks - 1);
      late.add(lateRanks[i]);
    }
    const GrowBlob mine = grow_blob(*c, 0, uniqueId);
    set_last_error(result, why, late);
    if (mine.has != GrowBlob::None) c->session.refuse(mine.id);
    return ncclSuccess;
  });
}

ncclResult_t pyncclCpuLeave(ncclComm_t comm) {
  return guarded("pyncclCpuLeave", [&] {
    std::shared_ptr<Comm> c;
    if (ncclResult_t r = comm_of(comm, "pyncclCpuLeave", &c); r != ncclSuccess) return r;
    return c->announce_leaving();
  });
}

ncclResult_t pyncclCpuIsGone(ncclComm_t comm, int rank, int* gone) {
  return ask_of("pyncclCpuIsGone", "gone", comm, rank, gone, [&](Comm& c) {
    std::lock_guard<std::mutex> lock(c.session.mutex);
    const Peer& peer = c.peer(rank);
    if (!peer.gone || peer.left) return pyncclCpuNotGone;
    return peer.failed.load() ? pyncclCpuFailed : pyncclCpuDied;
  });
}

ncclResult_t pyncclCpuIsAwaited(ncclComm_t comm, int rank, int* awaited) {
  return ask_of("pyncclCpuIsAwaited", "awaited", comm, rank, awaited, [&](Comm& c) {
    return int(per_process<Deadlocks>().awaits(c, rank) || c.session.awaits(rank) || c.awaits_leaving(rank));
  });
}

ncclResult_t pyncclCpuParentRank(ncclComm_t comm, int rank, int* parentRank) {
  return ask_of("pyncclCpuParentRank", "parentRank", comm, rank, parentRank, [&](Comm& c) {
    return size_t(rank) < c.parent_ranks.size() ? c.parent_ranks[size_t(rank)] : -1;
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return ask("ncclCommCount", "count", comm, count, [](const Comm& c) { return c.nranks; });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return ask("ncclCommCuDevice", "device", comm, device, [](const Comm& c) { return c.device; });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return ask("ncclCommUserRank", "rank", comm, rank, [](const Comm& c) { return c.rank; });
}

}  // extern "C"
