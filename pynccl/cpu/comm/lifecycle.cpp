#include "comm/lifecycle.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <numeric>

#include "base/guard.hpp"
#include "comm/fault.hpp"

namespace pncpu {

ncclResult_t any_comm_of(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm) {
  *comm = find_handle<Comm>(handle, function);
  if (!*comm) return ncclInvalidArgument;
  return (*comm)->comm_state.ending() == CommState::End::None ? ncclSuccess
                                                              : refuse_handle<Comm>(handle, function);
}

ncclResult_t comm_of(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm) {
  ncclResult_t r = any_comm_of(handle, function, comm);
  return r == ncclSuccess ? check_ready(**comm, function) : r;
}

ncclResult_t check_ready(Comm& comm, const char* function, bool only_takes) {
  CommState& comm_state = comm.comm_state;
  if (comm_state.revoked.load() && comm_state.phase.load() != Phase::Creating) return ncclSuccess;
  if (comm_state.pending() == ncclInProgress || comm_state.must_poll())
    return fail_in(function, ncclInvalidArgument,
                   "comm %p is used before the previous operation returned ncclSuccess "
                   "(ncclCommGetAsyncError)",
                   static_cast<void*>(comm.handle));
  if (ncclResult_t r = comm.check_sound(function, only_takes); r != ncclSuccess) return r;
  if (ncclResult_t r = comm_state.pending(); r != ncclSuccess)
    return fail_in(function, r, "comm is non-blocking: the error of an earlier wrong call stays its state");
  return ncclSuccess;
}

ncclResult_t spoil_state(Comm& comm, ncclResult_t code) {
  if (!comm.blocking && code != ncclSuccess && code != ncclInProgress &&
      comm.comm_state.pending() == ncclSuccess)
    comm.comm_state.set_pending(code);
  return code;
}

namespace {

// The fields of a configuration that NCCL checks, and the oldest version of a caller whose field it reads
// (src/init.cc: parseCommConfig), which is not always the release that brought the field.
struct ConfigField {
  const char* name;
  int ncclConfig_t::* member;
  int low, high;
  unsigned since;
};
constexpr ConfigField kConfigFields[] = {
    {"blocking", &ncclConfig_t::blocking, 0, 1, 21400},
    {"cgaClusterSize", &ncclConfig_t::cgaClusterSize, 0, INT32_MAX, 21700},
    {"minCTAs", &ncclConfig_t::minCTAs, 1, INT32_MAX, 21700},
    {"maxCTAs", &ncclConfig_t::maxCTAs, 1, INT32_MAX, 21700},
    {"splitShare", &ncclConfig_t::splitShare, 0, 1, 0},
    {"collnetEnable", &ncclConfig_t::collnetEnable, 0, 1, 22700},
    {"CTAPolicy", &ncclConfig_t::CTAPolicy, 0, 3, 22700},
    {"shrinkShare", &ncclConfig_t::shrinkShare, 0, 1, 22700},
    {"nvlsCTAs", &ncclConfig_t::nvlsCTAs, 1, INT32_MAX, 22700},
    {"nChannelsPerNetPeer", &ncclConfig_t::nChannelsPerNetPeer, 1, 64, 22800},
    {"nvlinkCentricSched", &ncclConfig_t::nvlinkCentricSched, 0, 1, 22800},
    {"graphUsageMode", &ncclConfig_t::graphUsageMode, 0, 2, 22900},
    {"numRmaCtx", &ncclConfig_t::numRmaCtx, 0, INT32_MAX, 22900},
    {"maxP2pPeers", &ncclConfig_t::maxP2pPeers, 1, INT32_MAX, 23000},
    {"graphStreamOrdering", &ncclConfig_t::graphStreamOrdering, 0, 1, 23005},
    // NCCL refuses none.
    {"numRmaSig", &ncclConfig_t::numRmaSig, INT32_MIN, INT32_MAX, 23102},
};

ncclResult_t check_field(const ConfigField& field, int value, const char* function) {
  if (value == NCCL_CONFIG_UNDEF_INT || (value >= field.low && value <= field.high)) return ncclSuccess;
  std::string expected = field.high == INT32_MAX
                             ? std::to_string(field.low) + " or more"
                             : std::to_string(field.low) + " to " + std::to_string(field.high);
  return fail_in(function, ncclInvalidArgument, "config.%s is %d, expected %s", field.name, value,
                 expected.c_str());
}

ncclResult_t check_config(const ncclConfig_t& config, const char* function) {
  for (const ConfigField& field : kConfigFields)
    if (ncclResult_t r = check_field(field, config.*field.member, function); r != ncclSuccess) return r;
  if (config.minCTAs <= config.maxCTAs) return ncclSuccess;
  if (config.maxCTAs != NCCL_CONFIG_UNDEF_INT)
    return fail_in(function, ncclInvalidArgument, "config.minCTAs %d is greater than config.maxCTAs %d",
                   config.minCTAs, config.maxCTAs);
  // NCCL compares before it fills in the defaults.
  return fail_in(function, ncclInvalidArgument,
                 "config.minCTAs is %d and config.maxCTAs is not set, which NCCL refuses: set both",
                 config.minCTAs);
}

// An older caller's struct is shorter, and sets no fields that are newer than its version.
ncclConfig_t whole_config(const ncclConfig_t& config) {
  ncclConfig_t whole;
  memset(&whole, 0, sizeof whole);
  for (const ConfigField& field : kConfigFields) whole.*field.member = NCCL_CONFIG_UNDEF_INT;
  memcpy(&whole, &config, std::min(sizeof whole, config.size));
  for (const ConfigField& field : kConfigFields)
    if (whole.version < field.since) whole.*field.member = NCCL_CONFIG_UNDEF_INT;
  return whole;
}

}  // namespace

ncclResult_t read_config(const ncclConfig_t* config, const char* function, Config* out) {
  if (config) {
    if (config->magic != NCCL_API_MAGIC)
      return fail_in(function, ncclInvalidArgument, "config is not initialized (magic 0x%x)", config->magic);
    ncclConfig_t whole = whole_config(*config);
    if (ncclResult_t r = check_config(whole, function); r != ncclSuccess) return r;
    if (whole.blocking != NCCL_CONFIG_UNDEF_INT) out->blocking = whole.blocking;
    if (whole.commName) out->name = whole.commName;
    if (whole.numRmaCtx != NCCL_CONFIG_UNDEF_INT) out->contexts = std::min(whole.numRmaCtx, kCounters);
    if (whole.numRmaSig > 0) out->signals = whole.numRmaSig;
    out->signals = std::min(out->signals, kCounters / std::max(1, out->contexts));
  }
  int64_t forced = param_int("NCCL_COMM_BLOCKING");
  if (forced == 0 || forced == 1) out->blocking = int(forced);
  return ncclSuccess;
}

namespace {
// For programs that exit without destroying their communicators: completes issued calls, so that ranks which
// need nothing more see no failure.
void leave_all() {
  Deadline deadline = after_ms(2000);
  guarded("exit", [&] {
    for (auto& comm : handles<Comm>().all())
      if (comm->comm_state.ending() == CommState::End::None &&
          comm->comm_state.phase.load() == Phase::Ready && comm->drain(deadline) == ncclSuccess &&
          comm->error() == ncclSuccess)
        comm->announce_leaving();
    return ncclSuccess;
  });
}
}  // namespace

ncclResult_t inject_fault(Comm& comm, const char* function) {
  Fault fault = fault_point(comm.rank, ++comm.calls);
  if (fault.action == FaultAction::Fail)
    return fail_in(function, fault.result, "made to fail by PYNCCL_CPU_FAULT");
  if (fault.action == FaultAction::Drop) comm.session.drop_connections();
  return ncclSuccess;
}

std::shared_ptr<Comm> make_comm(int rank, int nranks, int device, std::shared_ptr<Domain> domain,
                                const Config& config) {
  static const int at_exit = std::atexit(leave_all);
  (void)at_exit;
  auto comm = std::make_shared<Comm>(device, std::move(domain));
  comm->session.set_shape(rank, nranks);
  comm->blocking = config.blocking != 0;
  comm->name = config.name;
  comm->session.contexts = config.contexts;
  comm->session.signals = config.signals;
  return comm;
}

namespace {
// Threads whose creations must fail, and the running creations by thread.
struct Creators {
  std::mutex mutex;
  std::set<int> interrupted;
  std::multimap<int, Comm*> running;
};
Creators& creators() { return per_process<Creators>(); }

class Creator {
 public:
  explicit Creator(Comm& comm) {
    int thread = int(syscall(SYS_gettid));
    std::lock_guard<std::mutex> lock(creators().mutex);
    if (creators().interrupted.count(thread)) comm.session.stop_creation();
    at_ = creators().running.emplace(thread, &comm);
  }
  ~Creator() {
    std::lock_guard<std::mutex> lock(creators().mutex);
    creators().running.erase(at_);
  }
  Creator(const Creator&) = delete;
  Creator& operator=(const Creator&) = delete;

 private:
  std::multimap<int, Comm*>::iterator at_;
};
}  // namespace

void interrupt_creations(int thread, bool on) {
  std::lock_guard<std::mutex> lock(creators().mutex);
  if (!on) return void(creators().interrupted.erase(thread));
  creators().interrupted.insert(thread);
  auto [first, last] = creators().running.equal_range(thread);
  for (auto it = first; it != last; ++it) it->second->session.stop_creation();
}

namespace {
ncclResult_t open(Comm& comm) {
  if (!comm.session.complete())
    return fail_at(comm.rank, comm.nranks, ncclInternalError, "its creation was aborted");
  comm.open();
  return ncclSuccess;
}
}  // namespace

ncclResult_t init(const std::shared_ptr<Comm>& comm, const std::vector<Id>& ids, uint64_t ids_hash) {
  Creator here(*comm);
  Table table;
  if (ncclResult_t r = comm->session.join(ids, ids_hash, &table); r != ncclSuccess) return r;
  return connect(*comm, table);
}

ncclResult_t connect(Comm& comm, const Table& table) {
  Creator here(comm);
  comm.expect_signals();
  if (ncclResult_t r = comm.session.connect(table); r != ncclSuccess) return r;
  return open(comm);
}

Meeting::Meeting(std::shared_ptr<Comm> comm, std::vector<int> ranks, const char* function, bool after_failure)
    : place_(std::make_shared<Place>()) {
  place_->function = function;
  place_->tags = comm->claim_meeting(ranks, after_failure);
  place_->ranks = std::move(ranks);
  place_->comm = std::move(comm);
}

std::string Meeting::Place::blob(Part part, std::string_view body) const {
  return std::string(function) + '\0' + char(part) + std::string(body);
}

// Without memory the others wait until they time out. A communicator that ranks have failed by different
// calls has no use for it (Session::exchange).
Meeting::Place::~Place() {
  if (taken.load() || tags.empty() || comm->broken(tags[0])) return;
  try {
    const ErrorCode code = last_error_code();
    std::string_view why = last_error();
    if (code.reported) why.remove_prefix(size_t(code.function) + code.place);
    std::string text = blob(code.reported ? AbsentFor : Absent, why.substr(0, kMaxText));
    for (size_t i = 0; i < ranks.size(); ++i)
      if (ranks[i] != comm->rank)
        comm->session.send(ranks[i], Ctl::Exchange, text.data(), text.size(), tags[i]);
  } catch (const std::bad_alloc&) {
  }
}

std::vector<int> Meeting::everyone(const Comm& comm) {
  std::vector<int> ranks(static_cast<size_t>(comm.nranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

ncclResult_t Meeting::meet(const std::string& mine, std::vector<std::string>* all) const {
  const auto& [comm, ranks, tags, function, seconds, taken] = *place_;
  place_->taken.store(true);
  std::string blob = place_->blob(Place::Comes, mine);
  std::vector<Blob> blobs;
  std::vector<char> body(blob.begin(), blob.end());
  if (ncclResult_t r = comm->session.exchange(tags, ranks, body, &blobs, function, seconds); r != ncclSuccess)
    return r;
  all->clear();
  std::string absent;
  for (size_t i = 0; i < blobs.size(); ++i) {
    std::string theirs(blobs[i].data, blobs[i].size);
    size_t end = theirs.find('\0');
    if (theirs.compare(0, end, function) != 0)
      return comm->disagree(tags[0], "rank " + std::to_string(comm->rank) + " called " + function +
                                         ", rank " + std::to_string(ranks[i]) + " called another function, " +
                                         theirs.substr(0, end));
    const char part = theirs.at(end + 1);
    all->push_back(theirs.substr(end + 2));
    if (part == Place::Comes || !absent.empty()) continue;
    absent = (part == Place::Absent ? "rank " + std::to_string(ranks[i]) + " reports: " : "") + all->back();
  }
  return absent.empty() ? ncclSuccess : comm->say({ncclRemoteError, Mismatch::None, true}, absent);
}

ncclResult_t Meeting::agree(const std::vector<std::string>& calls) const {
  if (std::all_of(calls.begin(), calls.end(), [&](auto& call) { return call == calls[0]; }))
    return ncclSuccess;
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t i = 0; i < calls.size(); ++i) {
    auto at =
        std::find_if(groups.begin(), groups.end(), [&](auto& group) { return group.first == calls[i]; });
    if (at == groups.end()) at = groups.insert(at, {calls[i], {}});
    at->second.push_back(ranks()[i]);
  }
  std::string text;
  for (auto& [call, ranks] : groups) {
    text += text.empty() ? "" : "; ";
    text += ranks.size() > 1 ? "ranks " : "rank ";
    for (int q : ranks) text += (q == ranks[0] ? "" : ", ") + std::to_string(q);
    text += " called " + std::string(place_->function) + " " + call;
  }
  return place_->comm->disagree(place_->tags[0], text);
}

ncclResult_t init_all(const std::vector<std::shared_ptr<Comm>>& comms) {
  std::deque<Creator> here;
  std::vector<PeerInfo> infos;
  for (auto& comm : comms) {
    here.emplace_back(*comm);
    if (ncclResult_t r = comm->session.introduce(); r != ncclSuccess) return r;
    infos.push_back(comm->session.self);
  }
  Table table = Table::of(std::move(infos));
  for (auto& comm : comms) {
    comm->expect_signals();
    if (ncclResult_t r = comm->session.begin(table); r != ncclSuccess) return r;
  }
  for (auto& comm : comms)
    if (ncclResult_t r = comm->session.finish(); r != ncclSuccess) return r;
  for (auto& comm : comms)
    if (ncclResult_t r = open(*comm); r != ncclSuccess) return r;
  return ncclSuccess;
}

ncclResult_t finalize(Comm& comm) {
  // The jobs of a group run concurrently.
  if (comm.comm_state.ending() != CommState::End::None)
    return fail_in("ncclCommFinalize", ncclInvalidUsage,
                   "comm %p was destroyed or aborted before the group ended",
                   static_cast<void*>(comm.handle));
  comm.announce_leaving();
  comm.drain(kForever);
  if (comm.error() == ncclSuccess && comm.await_leaving() == ncclTimeout)
    comm.fail_with(ncclTimeout, last_error(), false);
  comm.comm_state.phase.store(Phase::Finalized);
  comm.comm_state.set_pending(comm.error());
  if (comm.error() == ncclSuccess) return ncclSuccess;
  return comm.say(comm.error_code(), comm.error_text());
}

Ending::Ending(std::shared_ptr<Comm> comm, CommState::End how)
    : comm_(std::move(comm)), how_(how), begun_(comm_->comm_state.begin_end(how)) {}

Ending::~Ending() {
  if (begun_) comm_->comm_state.take_back_end();
}

bool Ending::may_run() const {
  return begun_ || (how_ == CommState::End::Abort && comm_->comm_state.ending() == CommState::End::Destroy);
}

// The communicator ends even if an earlier step fails.
ncclResult_t Ending::run() {
  if (how_ == CommState::End::Abort) cut_short();
  if (!begun_ && !await_destruction()) return ncclSuccess;
  ncclResult_t r =
      guarded(how_ == CommState::End::Abort ? "ncclCommAbort" : "ncclCommDestroy", [&] { return leave(); });
  comm_->close_buffers();
  comm_->session.disconnect();
  handles<Comm>().take(comm_->handle);
  comm_->comm_state.ended();
  begun_ = false;
  return r;
}

void Ending::cut_short() {
  Comm& comm = *comm_;
  char text[512];
  int length = snprintf(text, sizeof text, "rank %d aborted its communicator", comm.rank);
  try {
    const std::string doing = per_process<Deadlocks>().doing(comm);
    if (!doing.empty()) snprintf(text + length, sizeof text - size_t(length), ": %s", doing.c_str());
  } catch (const std::bad_alloc&) {  // without the reason
  }
  comm.session.stop();
  comm.stop_children();
  if (!comm.session.left.load() || comm.comm_state.phase.load() != Phase::Finalized) {
    // Peers must hear the cause before this rank's connection ends, or they would report this rank.
    if (comm.stop_calls(text))
      comm.tell(ncclRemoteError, text);
    else
      comm.tell_error();
  }
  comm.session.notify();
}

// Waits for a destruction by another thread. True: it was taken back, and this call ends the communicator.
bool Ending::await_destruction() {
  while (!comm_->comm_state.await_end())
    if ((begun_ = comm_->comm_state.begin_end(how_))) return true;
  return false;
}

// A destruction returns the communicator's error if no call has told the caller of it: it is the last that
// can. It is silent if the error is only that another rank has ended, or has left without a call.
ncclResult_t Ending::leave() {
  Comm& comm = *comm_;
  bool aborts = how_ == CommState::End::Abort;
  if (!comm.comm_state.cancel_creation()) comm.comm_state.await_pending();
  Phase phase = comm.comm_state.phase.load();
  if (phase == Phase::Creating) return ncclSuccess;
  if (!aborts) comm.announce_leaving();
  comm.drain(aborts ? after_ms(5000) : kForever);
  ErrorCode code = comm.error_code();
  bool others = code.result == ncclRemoteError || code.mismatch == Mismatch::Departed;
  bool heard = phase == Phase::Finalized || comm.is_heard_of() || comm.comm_state.revoked.load();
  return code.failed() && !aborts && !others && !heard ? comm.say(code, comm.error_text()) : ncclSuccess;
}

}  // namespace pncpu
