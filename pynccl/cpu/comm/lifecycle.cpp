#include "comm/lifecycle.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <numeric>

namespace pncpu {

std::shared_ptr<Comm> comm_of(ncclComm_t handle, const char* function, bool ready) {
  std::shared_ptr<Comm> comm = find_handle<Comm>(handle, function);
  if (!comm) return nullptr;
  if (comm->standing.ending() != Standing::End::None) return refuse_handle<Comm>(handle, function), nullptr;
  if (ready && (comm->standing.pending() == ncclInProgress || comm->standing.must_poll())) {
    fail(ncclInvalidArgument,
         "%s: comm %p is used before the previous operation on it returned ncclSuccess "
         "(ncclCommGetAsyncError)",
         function, static_cast<void*>(handle));
    return nullptr;
  }
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

std::shared_ptr<Comm> make_comm(int rank, int nranks, int device, std::shared_ptr<Domain> domain,
                                const Config& config) {
  auto comm = std::make_shared<Comm>(device, std::move(domain));
  comm->session.set_shape(rank, nranks);
  comm->blocking = config.blocking != 0;
  comm->name = config.name;
  return comm;
}

void publish(const std::shared_ptr<Comm>& comm, ncclComm_t* out) {
  *out = comm->handle = static_cast<ncclComm_t>(handles<Comm>().add(comm));
}

void withdraw(const std::shared_ptr<Comm>& comm, ncclComm_t* out) {
  handles<Comm>().take(comm->handle);
  comm->session.stop();
  comm->session.disconnect();
  *out = nullptr;
}

void cancel_creation(Comm& comm, const char* why) {
  if (comm.standing.pending() != ncclInProgress) return;
  comm.fail_with(ncclInvalidUsage, why, false);
  comm.standing.set_pending(ncclInvalidUsage);
}

namespace {
// Threads whose creations are to fail, and the creations that run, by their threads.
struct Creations {
  std::mutex mutex;
  std::set<int> interrupted;
  std::multimap<int, Comm*> running;
};
Creations& creations() { return per_process<Creations>(); }

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

ncclResult_t init(const std::shared_ptr<Comm>& comm, const std::vector<Id>& ids, uint64_t ids_hash) {
  Creation here(*comm);
  Table table;
  if (ncclResult_t r = comm->session.join(ids, ids_hash, &table); r != ncclSuccess) return r;
  return connect(*comm, table);
}

ncclResult_t connect(Comm& comm, const Table& table) {
  Creation here(comm);
  if (ncclResult_t r = comm.session.connect(table); r != ncclSuccess) return r;
  comm.open();
  return ncclSuccess;
}

Meeting::Meeting(std::shared_ptr<Comm> comm, std::vector<int> ranks, const char* function)
    : comm_(std::move(comm)),
      ranks_(std::move(ranks)),
      tags_(comm_->claim_meeting(ranks_)),
      function_(function) {}

std::vector<int> Meeting::everyone(const Comm& comm) {
  std::vector<int> ranks(static_cast<size_t>(comm.nranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

ncclResult_t Meeting::meet(const std::string& mine, std::vector<std::string>* all) const {
  std::string blob = std::string(function_) + '\0' + mine;
  std::vector<Blob> blobs;
  std::vector<char> body(blob.begin(), blob.end());
  if (ncclResult_t r = comm_->session.exchange(tags_, ranks_, body, &blobs, function_); r != ncclSuccess)
    return r;
  all->clear();
  for (size_t i = 0; i < blobs.size(); ++i) {
    std::string theirs(blobs[i].data, blobs[i].size);
    size_t end = theirs.find('\0');
    if (theirs.compare(0, end, function_) != 0) {
      comm_->mismatch("rank " + std::to_string(comm_->rank) + " called " + function_ + ", rank " +
                      std::to_string(ranks_[i]) + " called another function, " + theirs.substr(0, end));
      return comm_->error();
    }
    all->push_back(theirs.substr(end + 1));
  }
  return ncclSuccess;
}

ncclResult_t init_all(const std::vector<std::shared_ptr<Comm>>& comms) {
  std::deque<Creation> here;
  std::vector<PeerInfo> infos;
  for (auto& comm : comms) {
    here.emplace_back(*comm);
    if (ncclResult_t r = comm->session.introduce(); r != ncclSuccess) return r;
    infos.push_back(comm->session.self);
  }
  Table table = Table::of(std::move(infos));
  for (auto& comm : comms)
    if (ncclResult_t r = comm->session.begin(table); r != ncclSuccess) return r;
  for (auto& comm : comms)
    if (ncclResult_t r = comm->session.finish(); r != ncclSuccess) return r;
  for (auto& comm : comms) comm->open();
  return ncclSuccess;
}

ncclResult_t finalize(Comm& comm) {
  comm.announce_leaving();
  comm.drain(kForever);
  if (comm.error() == ncclSuccess) comm.await_leaving();
  comm.standing.phase.store(Phase::Finalized);
  comm.standing.set_pending(comm.error());
  return comm.error();
}

namespace {
ncclResult_t let_go(const std::shared_ptr<Comm>& comm) {
  comm->session.disconnect();
  handles<Comm>().take(comm->handle);
  comm->standing.ended();
  return ncclSuccess;
}
}  // namespace

// An abort by another thread cuts it short.
ncclResult_t destroy(const std::shared_ptr<Comm>& comm) {
  comm->standing.await_pending();
  if (comm->standing.phase.load() != Phase::Creating) {
    comm->announce_leaving();
    comm->drain(kForever);
  }
  return let_go(comm);
}

ncclResult_t abort(const std::shared_ptr<Comm>& comm) {
  Standing& standing = comm->standing;
  comm->session.stop();
  std::string text = "rank " + std::to_string(comm->rank) + " aborted its communicator";
  bool left = comm->session.left.load() && standing.phase.load() == Phase::Finalized;
  if (!left) {
    bool first = comm->decide(ncclInvalidUsage, text);
    // Peers must hear the cause before they see the connection end, or they would take this rank for the
    // culprit.
    comm->tell_error(first ? ncclRemoteError : comm->error());
  }
  comm->session.notify();
  if (standing.ending() == Standing::End::Destroy) return standing.await_end(), ncclSuccess;
  standing.await_pending();
  comm->drain(after_ms(5000));
  return let_go(comm);
}

}  // namespace pncpu
