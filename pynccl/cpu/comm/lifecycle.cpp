#include "comm/lifecycle.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace pncpu {

Comm* comm_of(ncclComm_t handle, const char* function, bool ready) {
  if (!handle) return fail(ncclInvalidArgument, "%s: comm is NULL", function), nullptr;
  Comm* comm = comms().find(handle);
  if (!comm) {
    const char* what = comms().was_valid(handle) ? "has been destroyed or aborted" : "is not a communicator";
    return fail(ncclInvalidArgument, "%s: comm %p %s", function, static_cast<void*>(handle), what), nullptr;
  }
  if (comm->generation != process_generation())
    return fail(ncclInvalidArgument,
                "%s: comm %p belongs to the parent process: a forked child cannot use it", function,
                static_cast<void*>(handle)),
           nullptr;
  if (ready && comm->pending() == ncclInProgress)
    return fail(ncclInvalidArgument,
                "%s: comm %p is used before the previous operation on it returned ncclSuccess "
                "(ncclCommGetAsyncError)",
                function, static_cast<void*>(handle)),
           nullptr;
  return comm;
}

ncclResult_t read_config(const ncclConfig_t* config, const char* function, Config* out) {
  if (config) {
    if (config->magic != NCCL_API_MAGIC)
      return fail(ncclInvalidArgument, "%s: config is not initialized (magic 0x%x)", function, config->magic);
    // An older caller's struct is shorter; what it does not have keeps its default.
    ncclConfig_t full;
    memset(&full, 0, sizeof full);
    for (int* field : {&full.blocking, &full.cgaClusterSize, &full.minCTAs, &full.maxCTAs, &full.splitShare,
                       &full.shrinkShare, &full.CTAPolicy})
      *field = NCCL_CONFIG_UNDEF_INT;
    memcpy(&full, config, std::min(sizeof full, config->size));
    auto within = [&](const char* name, int value, int low, int high) {
      if (value == NCCL_CONFIG_UNDEF_INT || (value >= low && value <= high)) return true;
      fail(ncclInvalidArgument, "%s: config.%s is %d, expected %d to %d", function, name, value, low, high);
      return false;
    };
    if (!within("blocking", full.blocking, 0, 1) || !within("cgaClusterSize", full.cgaClusterSize, 0, 8) ||
        !within("minCTAs", full.minCTAs, 1, INT32_MAX) || !within("maxCTAs", full.maxCTAs, 1, INT32_MAX) ||
        !within("splitShare", full.splitShare, 0, 1) || !within("shrinkShare", full.shrinkShare, 0, 1) ||
        !within("CTAPolicy", full.CTAPolicy, 0, 3))
      return ncclInvalidArgument;
    if (full.minCTAs != NCCL_CONFIG_UNDEF_INT && full.maxCTAs != NCCL_CONFIG_UNDEF_INT &&
        full.minCTAs > full.maxCTAs)
      return fail(ncclInvalidArgument, "%s: config.minCTAs %d is greater than config.maxCTAs %d", function,
                  full.minCTAs, full.maxCTAs);
    if (full.blocking != NCCL_CONFIG_UNDEF_INT) out->blocking = full.blocking;
    if (full.commName) out->name = full.commName;
  }
  int64_t forced = param_int("NCCL_COMM_BLOCKING");
  if (forced == 0 || forced == 1) out->blocking = int(forced);
  return ncclSuccess;
}

std::shared_ptr<Comm> make_comm(int rank, int nranks, int device, int copy, const Config& config) {
  auto comm = std::make_shared<Comm>(device);
  comm->session.set_shape(rank, nranks);
  comm->blocking = config.blocking != 0;
  comm->name = config.name;
  comm->default_stream = default_stream(device, copy);
  return comm;
}

namespace {
// Owns every communicator that has a handle.
struct Owners {
  std::mutex mutex;
  std::map<Comm*, std::shared_ptr<Comm>> by_address;
};
Owners& owners() {
  static auto* o = new Owners;
  return *o;
}
}  // namespace

ncclResult_t publish(const std::shared_ptr<Comm>& comm, ncclComm_t* out) {
  {
    std::lock_guard<std::mutex> lock(owners().mutex);
    owners().by_address[comm.get()] = comm;
  }
  comm->handle = static_cast<ncclComm_t>(comms().add(comm.get()));
  if (!comm->handle) return fail(ncclInternalError, "this process has created too many communicators");
  *out = comm->handle;
  return ncclSuccess;
}

std::shared_ptr<Comm> take_ownership(ncclComm_t handle) {
  Comm* comm = comms().remove(handle);
  if (!comm) return nullptr;
  std::lock_guard<std::mutex> lock(owners().mutex);
  std::shared_ptr<Comm> owned = std::move(owners().by_address[comm]);
  owners().by_address.erase(comm);
  return owned;
}

void withdraw(const std::shared_ptr<Comm>& comm, ncclComm_t* out) {
  take_ownership(comm->handle);
  comm->session.stop();
  comm->session.disconnect();
  *out = nullptr;
}

namespace {
// Threads whose creations are to fail, and the creations that run, by their threads.
struct Creations {
  std::mutex mutex;
  std::set<int> interrupted;
  std::multimap<int, Comm*> running;
};
Creations& creations() {
  static auto* c = new Creations;
  return *c;
}

class Creation {
 public:
  explicit Creation(Comm& comm) {
    int thread = int(syscall(SYS_gettid));
    std::lock_guard<std::mutex> lock(creations().mutex);
    if (creations().interrupted.count(thread)) comm.session.stop();
    at_ = creations().running.emplace(thread, &comm);
  }
  ~Creation() {
    std::lock_guard<std::mutex> lock(creations().mutex);
    creations().running.erase(at_);
  }
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

 private:
  std::multimap<int, Comm*>::iterator at_;
};
}  // namespace

void interrupt_creations(int thread, bool on) {
  std::lock_guard<std::mutex> lock(creations().mutex);
  if (!on) return void(creations().interrupted.erase(thread));
  creations().interrupted.insert(thread);
  auto [first, last] = creations().running.equal_range(thread);
  for (auto it = first; it != last; ++it) it->second->session.stop();
}

ncclResult_t init(const std::shared_ptr<Comm>& comm, const Id& id, uint64_t ids_hash) {
  Creation here(*comm);
  std::vector<PeerInfo> table;
  if (ncclResult_t r = comm->session.join(id, ids_hash, &table); r != ncclSuccess) return r;
  return connect(*comm, table);
}

ncclResult_t connect(Comm& comm, const std::vector<PeerInfo>& table) {
  Creation here(comm);
  if (ncclResult_t r = comm.session.connect(table); r != ncclSuccess) return r;
  comm.open();
  return ncclSuccess;
}

ncclResult_t derive(Comm& parent, const std::vector<int>& ranks, uint64_t tag, const std::string& mine,
                    const char* function, std::vector<std::string>* all) {
  std::vector<std::vector<char>> blobs;
  std::vector<char> body(mine.begin(), mine.end());
  if (ncclResult_t r = parent.session.exchange(tag, ranks, body, &blobs, function); r != ncclSuccess)
    return r;
  all->clear();
  for (auto& b : blobs) all->emplace_back(b.begin(), b.end());
  return ncclSuccess;
}

ncclResult_t finalize(Comm& comm) {
  comm.phase.store(Phase::Finalizing);
  comm.announce_leaving();
  comm.drain(kForever);
  if (comm.error() == ncclSuccess) comm.await_leaving();
  comm.phase.store(Phase::Finalized);
  comm.set_pending(comm.error());
  return comm.error();
}

namespace {
// Streams are joined here, by the caller, never by the thread that runs them.
void let_go(const std::shared_ptr<Comm>& comm) {
  comm->session.disconnect();
  std::shared_ptr<Stream> stream = std::move(comm->default_stream);
}
}  // namespace

ncclResult_t destroy(const std::shared_ptr<Comm>& comm) {
  comm->await_pending();
  if (comm->phase.load() == Phase::Creating) return let_go(comm), ncclSuccess;
  comm->announce_leaving();
  comm->drain(kForever);
  let_go(comm);
  return ncclSuccess;
}

ncclResult_t abort(const std::shared_ptr<Comm>& comm) {
  comm->session.stop();
  bool leaving = comm->session.left.load() && comm->phase.load() == Phase::Finalized;
  if (!leaving) {
    comm->fail_with(ncclRemoteError, "rank " + std::to_string(comm->rank) + " aborted its communicator",
                    false);
    // Peers must hear the cause before they see the connection end, or they would take this rank for the
    // culprit.
    comm->tell_error();
  }
  comm->changed.notify_all();
  if (comm->phase.load() == Phase::Creating || comm->phase.load() == Phase::Finalizing) comm->await_pending();
  comm->drain(after_ms(5000));
  let_go(comm);
  return ncclSuccess;
}

}  // namespace pncpu
