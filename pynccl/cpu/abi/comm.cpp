// The C API: creating, splitting, querying and ending communicators. Checks arguments, then delegates.
#include <algorithm>
#include <set>

#include "comm/fault.hpp"
#include "comm/lifecycle.hpp"

namespace pncpu {
namespace {

thread_local int t_device = 0;

#define REQUIRE_POINTER(function, pointer) \
  if (!(pointer)) return spoil(fail(ncclInvalidArgument, "%s: " #pointer " is NULL", function))

// How many communicators of the open group are on this device already.
int copy_of(int device) {
  int copy = 0;
  for (const Job& job : this_thread_group().jobs) copy += job.comm && job.comm->device == device;
  return copy;
}

// In the background the result is for who runs it to publish, together with its text.
ncclResult_t end_creation(const std::shared_ptr<Comm>& comm, ncclComm_t* out, ncclResult_t r) {
  if (r == ncclSuccess) return r;
  if (!comm->blocking) return comm->session.disconnect(), r;
  comm->set_pending(r);
  withdraw(comm, out);
  return r;
}

ncclResult_t submit_init(ncclComm_t* out, int nranks, int rank, const Id& id, uint64_t ids_hash,
                         const ncclConfig_t* config, const char* function, int device) {
  if (const char* wrong = fault_error()) return spoil(fail(ncclInvalidArgument, "%s: %s", function, wrong));
  *out = nullptr;
  if (nranks < 1)
    return spoil(fail(ncclInvalidArgument, "%s: nranks is %d, expected at least 1", function, nranks));
  if (!id.plausible())
    return spoil(
        fail(ncclInvalidArgument, "%s: commId was not made by ncclGetUniqueId of this library", function));
  Config settings;
  if (ncclResult_t r = read_config(config, function, &settings); r != ncclSuccess) return spoil(r);
  // A wrong rank is told to the root all the same, so that the others hear of it too.
  auto comm = make_comm(rank, nranks, device, copy_of(device), settings);
  if (ncclResult_t r = publish(comm, out); r != ncclSuccess) return spoil(r);
  Job job;
  job.comm = comm;
  job.blocking = comm->blocking;
  job.run = [comm, id, ids_hash, out] { return end_creation(comm, out, init(comm, id, ids_hash)); };
  return submit(std::move(job));
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

// A child that takes part in an exchange of its parent before its own shape is known.
struct Child {
  std::shared_ptr<Comm> comm;
  ncclComm_t* out = nullptr;
};

ncclResult_t make_child(Comm& parent, ncclComm_t* out, const ncclConfig_t* config, const char* function,
                        Child* child) {
  Config settings;
  settings.blocking = parent.blocking;
  settings.name = parent.name;
  if (ncclResult_t r = read_config(config, function, &settings); r != ncclSuccess) return r;
  child->comm = make_comm(0, 1, parent.device, 0, settings);
  child->comm->default_stream = parent.default_stream;
  child->out = out;
  return publish(child->comm, out);
}

// Connects the ranks of the parent that go together, in the order of `members`.
ncclResult_t connect_child(Child& child, const std::vector<std::pair<int, PeerInfo>>& members,
                           int parent_rank) {
  std::vector<PeerInfo> table;
  int rank = 0;
  for (auto& [r, info] : members) {
    if (r == parent_rank) rank = int(table.size());
    table.push_back(info);
  }
  child.comm->session.set_shape(rank, int(table.size()));
  return connect(*child.comm, table);
}

ncclResult_t end_child(const Child& child, ncclResult_t r) {
  return child.comm ? end_creation(child.comm, child.out, r) : r;
}

struct SplitBlob {
  int32_t color, key;
  PeerInfo info;
};

ncclResult_t run_split(std::shared_ptr<Comm> parent, Child child, int color, int key, uint64_t tag) {
  SplitBlob mine{color, key, {}};
  if (child.comm) {
    if (ncclResult_t r = child.comm->session.introduce(); r != ncclSuccess) return end_child(child, r);
    mine.info = child.comm->session.self;
  }
  std::vector<int> ranks;
  for (int q = 0; q < parent->nranks; ++q) ranks.push_back(q);
  std::vector<std::string> all;
  std::string blob(reinterpret_cast<char*>(&mine), sizeof mine);
  ncclResult_t r = derive(*parent, ranks, tag, blob, "ncclCommSplit", &all);
  if (r != ncclSuccess || !child.comm) return end_child(child, r);
  std::vector<std::pair<std::pair<int, int>, PeerInfo>> sorted;
  for (int q = 0; q < parent->nranks; ++q) {
    SplitBlob theirs;
    if (all[size_t(q)].size() != sizeof theirs)
      return end_child(
          child, fail(ncclInvalidUsage, "%sncclCommSplit: rank %d called another function", kMismatch, q));
    memcpy(static_cast<void*>(&theirs), all[size_t(q)].data(), sizeof theirs);
    if (theirs.color == color) sorted.push_back({{theirs.key, q}, theirs.info});
  }
  std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<std::pair<int, PeerInfo>> members;
  for (auto& [order, info] : sorted) members.push_back({order.second, info});
  return end_child(child, connect_child(child, members, parent->rank));
}

ncclResult_t run_shrink(std::shared_ptr<Comm> parent, Child child, std::set<int> excluded, uint64_t tag) {
  if (ncclResult_t r = child.comm->session.introduce(); r != ncclSuccess) return end_child(child, r);
  std::string list;
  for (int q : excluded) list += std::to_string(q) + " ";
  std::vector<int> ranks;
  for (int q = 0; q < parent->nranks; ++q)
    if (!excluded.count(q)) ranks.push_back(q);
  std::string blob(reinterpret_cast<char*>(&child.comm->session.self), sizeof(PeerInfo));
  std::vector<std::string> all;
  ncclResult_t r = derive(*parent, ranks, tag, blob + list, "ncclCommShrink", &all);
  if (r != ncclSuccess) return end_child(child, r);
  std::vector<std::pair<int, PeerInfo>> members;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (all[i].size() < sizeof(PeerInfo) || all[i].substr(sizeof(PeerInfo)) != list)
      return end_child(
          child, fail(ncclInvalidUsage, "%sncclCommShrink: rank %d excludes ranks [%s], rank %d ranks [%s]",
                      kMismatch, parent->rank, list.c_str(), ranks[i],
                      all[i].substr(std::min(all[i].size(), sizeof(PeerInfo))).c_str()));
    members.push_back({ranks[i], {}});
    memcpy(static_cast<void*>(&members.back().second), all[i].data(), sizeof(PeerInfo));
  }
  return end_child(child, connect_child(child, members, parent->rank));
}

struct GrowBlob {
  int32_t nranks, has_id;
  Id id;
};

ncclResult_t run_grow(std::shared_ptr<Comm> parent, Child child, int nranks, const Id* id, uint64_t tag) {
  GrowBlob mine{nranks, id != nullptr, id ? *id : Id()};
  std::vector<int> ranks;
  for (int q = 0; q < parent->nranks; ++q) ranks.push_back(q);
  std::vector<std::string> all;
  std::string blob(reinterpret_cast<char*>(&mine), sizeof mine);
  ncclResult_t r = derive(*parent, ranks, tag, blob, "ncclCommGrow", &all);
  if (r != ncclSuccess) return end_child(child, r);
  Id chosen;
  int makers = 0;
  for (int q = 0; q < parent->nranks; ++q) {
    GrowBlob theirs;
    if (all[size_t(q)].size() != sizeof theirs)
      return end_child(
          child, fail(ncclInvalidUsage, "%sncclCommGrow: rank %d called another function", kMismatch, q));
    memcpy(static_cast<void*>(&theirs), all[size_t(q)].data(), sizeof theirs);
    if (theirs.nranks != nranks)
      return end_child(child,
                       fail(ncclInvalidArgument, "ncclCommGrow: rank %d grows to %d ranks, rank %d to %d", q,
                            theirs.nranks, parent->rank, nranks));
    if (theirs.has_id) chosen = theirs.id, ++makers;
  }
  if (makers != 1)
    return end_child(child, fail(ncclInvalidUsage,
                                 "ncclCommGrow: %d existing ranks passed a uniqueId, expected one", makers));
  child.comm->session.set_shape(parent->rank, nranks);
  r = init(child.comm, chosen, 0);
  if (id && r == ncclSuccess) parent->grow_id_open = false;
  return end_child(child, r);
}

// What a call that derives a communicator needs of its parent.
ncclResult_t check_parent(Comm& parent, const char* function, bool may_have_failed) {
  if (parent.phase.load() == Phase::Finalized || parent.phase.load() == Phase::Finalizing)
    return fail(ncclInvalidUsage, "%s: comm has been finalized", function);
  if (parent.phase.load() == Phase::Suspended)
    return fail(ncclInvalidUsage, "%s: comm is suspended", function);
  if (parent.error() != ncclSuccess && !parent.revoked.load() && !may_have_failed)
    return fail(parent.error(), "%s: comm has failed: %s", function, parent.error_text().c_str());
  return ncclSuccess;
}

}  // namespace

int default_device() { return t_device; }

}  // namespace pncpu

using namespace pncpu;

extern "C" {

ncclResult_t pyncclCpuDeviceCount(int* count) {
  REQUIRE_POINTER("pyncclCpuDeviceCount", count);
  int64_t devices = param_int("PYNCCL_CPU_DEVICES"), local = param_int("LOCAL_WORLD_SIZE");
  *count = int(devices > 0 ? devices : local > 0 ? local : 1);
  return ncclSuccess;
}

ncclResult_t pyncclCpuSetDevice(int device) {
  if (device < 0)
    return fail(ncclInvalidArgument, "pyncclCpuSetDevice: device is %d, expected 0 or more", device);
  t_device = device;
  return ncclSuccess;
}

ncclResult_t pyncclCpuGetDevice(int* device) {
  REQUIRE_POINTER("pyncclCpuGetDevice", device);
  *device = t_device;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  REQUIRE_POINTER("ncclGetUniqueId", uniqueId);
  Id id;
  if (ncclResult_t r = make_id(&id, true); r != ncclSuccess) return r;
  return write_id(id, uniqueId);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  REQUIRE_POINTER("ncclCommInitRankConfig", comm);
  return submit_init(comm, nranks, rank, id_of(commId), 0, config, "ncclCommInitRankConfig",
                     default_device());
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  REQUIRE_POINTER("ncclCommInitRank", comm);
  return submit_init(comm, nranks, rank, id_of(commId), 0, nullptr, "ncclCommInitRank", default_device());
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId* commIds, ncclConfig_t* config) {
  REQUIRE_POINTER("ncclCommInitRankScalable", newcomm);
  REQUIRE_POINTER("ncclCommInitRankScalable", commIds);
  if (nId < 1 || nId > nranks)
    return spoil(fail(ncclInvalidArgument, "ncclCommInitRankScalable: nId is %d, expected 1 to nranks %d",
                      nId, nranks));
  Token hash = Token::of(std::string(reinterpret_cast<char*>(commIds), size_t(nId) * sizeof *commIds));
  return submit_init(newcomm, nranks, myrank, id_of(commIds[0]), nId > 1 ? hash.a : 0, config,
                     "ncclCommInitRankScalable", default_device());
}

ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  REQUIRE_POINTER("ncclCommInitAll", comm);
  if (ndev < 1)
    return spoil(fail(ncclInvalidArgument, "ncclCommInitAll: ndev is %d, expected at least 1", ndev));
  for (int i = 0; devlist && i < ndev; ++i)
    if (devlist[i] < 0)
      return spoil(
          fail(ncclInvalidArgument, "ncclCommInitAll: devlist[%d] is %d, expected 0 or more", i, devlist[i]));
  Id id;
  if (ncclResult_t r = make_id(&id, true); r != ncclSuccess) return spoil(r);
  ncclGroupStart();
  for (int i = 0; i < ndev; ++i)
    submit_init(&comm[i], ndev, i, id, 0, nullptr, "ncclCommInitAll", devlist ? devlist[i] : i);
  return ncclGroupEnd();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  Comm* parent = comm_of(comm, "ncclCommSplit");
  if (!parent) return spoil(ncclInvalidArgument);
  REQUIRE_POINTER("ncclCommSplit", newcomm);
  *newcomm = nullptr;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    return spoil(fail(ncclInvalidArgument,
                      "ncclCommSplit: color is %d, expected 0 or more or NCCL_SPLIT_NOCOLOR", color));
  if (ncclResult_t r = check_parent(*parent, "ncclCommSplit", false); r != ncclSuccess) return spoil(r);
  Child child;
  if (color != NCCL_SPLIT_NOCOLOR)
    if (ncclResult_t r = make_child(*parent, newcomm, config, "ncclCommSplit", &child); r != ncclSuccess)
      return spoil(r);
  Job job;
  job.comm = child.comm ? child.comm : parent->shared_from_this();
  job.blocking = !child.comm || child.comm->blocking;
  job.run = [p = parent->shared_from_this(), child, color, key, tag = uint64_t(1) << 32 | ++parent->derived] {
    return run_split(p, child, color, key, tag);
  };
  return submit(std::move(job));
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags) {
  Comm* parent = comm_of(comm, "ncclCommShrink");
  if (!parent) return spoil(ncclInvalidArgument);
  REQUIRE_POINTER("ncclCommShrink", newcomm);
  *newcomm = nullptr;
  if (shrinkFlags & ~NCCL_SHRINK_ABORT)
    return spoil(fail(ncclInvalidArgument, "ncclCommShrink: shrinkFlags is 0x%x", unsigned(shrinkFlags)));
  if (excludeRanksCount < 1 || excludeRanksCount >= parent->nranks)
    return spoil(fail(ncclInvalidArgument, "ncclCommShrink: excludeRanksCount is %d, expected 1 to %d",
                      excludeRanksCount, parent->nranks - 1));
  REQUIRE_POINTER("ncclCommShrink", excludeRanksList);
  std::set<int> excluded;
  for (int i = 0; i < excludeRanksCount; ++i) {
    int r = excludeRanksList[i];
    if (r < 0 || r >= parent->nranks || r == parent->rank || !excluded.insert(r).second)
      return spoil(fail(ncclInvalidArgument, "ncclCommShrink: excludeRanksList[%d] is %d: %s", i, r,
                        r == parent->rank              ? "the calling rank itself"
                        : r >= 0 && r < parent->nranks ? "named twice"
                                                       : "no rank of this communicator"));
  }
  bool abort = shrinkFlags & NCCL_SHRINK_ABORT;
  if (ncclResult_t r = check_parent(*parent, "ncclCommShrink", abort); r != ncclSuccess) return spoil(r);
  if (abort && !parent->revoked.exchange(true))
    parent->fail_with(ncclInvalidUsage, "stopped by ncclCommShrink with NCCL_SHRINK_ABORT", false);
  parent->drain(kForever);
  Child child;
  if (ncclResult_t r = make_child(*parent, newcomm, config, "ncclCommShrink", &child); r != ncclSuccess)
    return spoil(r);
  Job job;
  job.comm = child.comm;
  job.blocking = child.comm->blocking;
  job.run = [p = parent->shared_from_this(), child, excluded, tag = uint64_t(2) << 32 | ++parent->shrunk] {
    return run_shrink(p, child, excluded, tag);
  };
  return submit(std::move(job));
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId) {
  Comm* c = comm_of(comm, "ncclCommGetUniqueId");
  if (!c) return ncclInvalidArgument;
  REQUIRE_POINTER("ncclCommGetUniqueId", uniqueId);
  if (c->grow_id_open)
    return fail(ncclInvalidUsage,
                "ncclCommGetUniqueId: the id made before has not been used by ncclCommGrow yet");
  Id id;
  if (ncclResult_t r = make_id(&id, false); r != ncclSuccess) return r;
  c->grow_id_open = true;
  return write_id(id, uniqueId);
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
                          ncclComm_t* newcomm, ncclConfig_t* config) {
  REQUIRE_POINTER("ncclCommGrow", newcomm);
  if (!comm) {
    REQUIRE_POINTER("ncclCommGrow", uniqueId);
    return submit_init(newcomm, nRanks, rank, id_of(*uniqueId), 0, config, "ncclCommGrow", default_device());
  }
  Comm* parent = comm_of(comm, "ncclCommGrow");
  if (!parent) return spoil(ncclInvalidArgument);
  *newcomm = nullptr;
  if (rank != -1)
    return spoil(
        fail(ncclInvalidArgument, "ncclCommGrow: rank is %d, expected -1 from a rank that exists", rank));
  if (nRanks <= parent->nranks)
    return spoil(fail(ncclInvalidArgument, "ncclCommGrow: nRanks is %d, expected more than the %d there are",
                      nRanks, parent->nranks));
  if (ncclResult_t r = check_parent(*parent, "ncclCommGrow", false); r != ncclSuccess) return spoil(r);
  Child child;
  if (ncclResult_t r = make_child(*parent, newcomm, config, "ncclCommGrow", &child); r != ncclSuccess)
    return spoil(r);
  Job job;
  job.comm = child.comm;
  job.blocking = child.comm->blocking;
  Id id = uniqueId ? id_of(*uniqueId) : Id();
  job.run = [p = parent->shared_from_this(), child, nRanks, id, has_id = uniqueId != nullptr,
             tag = uint64_t(3) << 32 | ++parent->derived] {
    return run_grow(p, child, nRanks, has_id ? &id : nullptr, tag);
  };
  return submit(std::move(job));
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Comm* c = comm_of(comm, "ncclCommFinalize");
  if (!c) return spoil(ncclInvalidArgument);
  if (c->revoked.load()) return spoil(fail(ncclInvalidUsage, "ncclCommFinalize: comm has been revoked"));
  if (c->phase.load() == Phase::Finalized)
    return spoil(fail(ncclInvalidArgument, "ncclCommFinalize: comm has been finalized already"));
  if (c->error() != ncclSuccess)
    return spoil(fail(c->error(), "ncclCommFinalize: %s", c->error_text().c_str()));
  Job job;
  job.comm = c->shared_from_this();
  job.blocking = c->blocking;
  job.run = [keep = job.comm] { return finalize(*keep); };
  return submit(std::move(job));
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (!comm_of(comm, "ncclCommDestroy", false)) return spoil(ncclInvalidArgument);
  std::shared_ptr<Comm> owned = take_ownership(comm);
  if (!owned)
    return spoil(fail(ncclInvalidArgument, "ncclCommDestroy: comm is being destroyed by another thread"));
  Job job;
  job.run = [owned] { return destroy(owned); };
  return submit(std::move(job));
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (!comm_of(comm, "ncclCommAbort", false)) return spoil(ncclInvalidArgument);
  std::shared_ptr<Comm> owned = take_ownership(comm);
  if (!owned)
    return spoil(fail(ncclInvalidArgument, "ncclCommAbort: comm is being destroyed by another thread"));
  Job job;
  job.run = [owned] { return abort(owned); };
  return submit(std::move(job));
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
  Comm* c = comm_of(comm, "ncclCommRevoke");
  if (!c) return spoil(ncclInvalidArgument);
  if (revokeFlags != NCCL_REVOKE_DEFAULT)
    return spoil(fail(ncclInvalidArgument, "ncclCommRevoke: revokeFlags is %d, expected NCCL_REVOKE_DEFAULT",
                      revokeFlags));
  if (c->revoked.exchange(true)) return ncclSuccess;
  // Another thread may abort it meanwhile.
  std::shared_ptr<Comm> kept = c->shared_from_this();
  c->fail_with(ncclInvalidUsage, "rank " + std::to_string(c->rank) + " revoked its communicator");
  c->drain(kForever);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  Comm* c = comm_of(comm, "ncclCommGetAsyncError", false);
  if (!c) return ncclInvalidArgument;
  REQUIRE_POINTER("ncclCommGetAsyncError", asyncError);
  // A revoked communicator is quiet, not broken: it may be split, shrunk and destroyed.
  *asyncError = c->revoked.load() ? ncclSuccess : c->error() != ncclSuccess ? c->error() : c->pending();
  return ncclSuccess;
}

const char* ncclGetLastError(ncclComm_t comm) {
  if (Comm* c = comm ? comms().find(comm) : nullptr)
    if (std::string text = c->error_text(); !text.empty())
      set_last_error("rank " + std::to_string(c->rank) + " of " + std::to_string(c->nranks) + ": " + text);
  return last_error();
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  Comm* c = comm_of(comm, "ncclCommCount");
  if (!c) return ncclInvalidArgument;
  REQUIRE_POINTER("ncclCommCount", count);
  *count = c->nranks;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  Comm* c = comm_of(comm, "ncclCommCuDevice");
  if (!c) return ncclInvalidArgument;
  REQUIRE_POINTER("ncclCommCuDevice", device);
  *device = c->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  Comm* c = comm_of(comm, "ncclCommUserRank");
  if (!c) return ncclInvalidArgument;
  REQUIRE_POINTER("ncclCommUserRank", rank);
  *rank = c->rank;
  return ncclSuccess;
}

}  // extern "C"
