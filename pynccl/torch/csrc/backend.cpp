// Connecting, issuing, coalescing and ending.
#include "backend.hpp"

namespace pynccl {

decltype(provide) provide;
decltype(allocates) allocates;
decltype(allocate) allocate;
decltype(serve) serve;
decltype(join) join;

namespace {

constexpr Milliseconds kEndSeconds{5000}, kLeaveSeconds{500};

// Runs a blocking call in a separate thread, so that signals and the time limit work. An abandoned call keeps
// its captured objects alive. The error at the limit ends with `late`.
void bounded(std::function<void()> call, Milliseconds limit, const std::string& what, bool signals,
             const std::function<std::string()>& late = nullptr) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  std::thread([state, call = std::move(call)] {
    std::exception_ptr error;
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done = true;
    state->error = error;
    state->changed.notify_all();
  }).detach();
  auto deadline = Clock::now() + limit;
  std::unique_lock<std::mutex> lock(state->mutex);
  while (!state->changed.wait_for(lock, kSlice, [&] { return state->done; })) {
    if (signals) check_signals();
    if (Clock::now() >= deadline)
      C10_THROW_ERROR(DistBackendError, c10::str("pynccl: ", what, " took longer than ", limit.count(), "ms",
                                                 late ? late() : ""));
  }
  if (state->error) std::rethrow_exception(state->error);
}

// The id of a group's communicator, which its first rank makes. After a failed attempt it makes a new one.
std::optional<ncclUniqueId> exchange_id(const Api& api, const Attempt& attempt, const OwnStore& store,
                                        const std::string& key, bool first, std::string& tried) {
  ncclUniqueId id;
  if (first) {
    ncclResult_t result = api.ncclGetUniqueId(&id);
    const char* bytes = id.internal;
    std::string error = failed(result) ? api.describe(result, nullptr) : "";
    store->set(key, failed(result) ? std::vector<uint8_t>(error.begin(), error.end())
                                   : std::vector<uint8_t>(bytes, bytes + sizeof id));
    api.check(result, "ncclGetUniqueId");
    return id;
  }
  std::string bytes;
  do {
    if (!attempt.await(store, key, std::chrono::seconds(30))) return std::nullopt;
    auto value = store->get(key);
    bytes.assign(value.begin(), value.end());
    if (bytes == tried) std::this_thread::sleep_for(kSlice);
  } while (bytes == tried);
  tried = bytes;
  if (bytes.size() != sizeof id)
    C10_THROW_ERROR(DistBackendError, "ncclGetUniqueId failed on rank 0: " + bytes);
  std::copy(bytes.begin(), bytes.end(), id.internal);
  return id;
}

// The key by which a rank says that it connects.
std::string presence(const std::string& key, int rank) { return c10::str(key, "/comes/", rank); }

// Which other ranks have not begun to connect, for the end of a message.
std::string absent(const Stores& stores, const std::string& key, int rank, int size) {
  std::string ranks;
  try {
    const StorePtr own = stores.common();
    for (int r = 0; r < size; ++r)
      if (r != rank && !(*own)->check({presence(key, r)}))
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  } catch (const std::exception&) {
    return "; the store cannot be reached, so rank 0 may have died";
  }
  if (ranks.empty()) return "; all ranks of the group have begun to connect, and one may have died since";
  return "; of the group's ranks these have not come: " + ranks;
}

}  // namespace

Backend::Backend(intrusive_ptr<c10d::Store> store, int rank, int size, const Options& options, bool cpu_only,
                 Named named)
    : c10d::Backend(rank, size),
      cpu_only_(cpu_only),
      store_(std::move(store)),
      options_(c10::make_intrusive<Options>(options)),
      ended_(!store_),
      released_(!store_),
      named_(std::move(named)) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "rank is ", rank, ", expected 0 to ", size - 1);
#ifdef PYNCCL_HAS_RECONFIGURE
  options_->enable_reconfigure = !store_;
#endif
  if (store_) stores_.emplace(store_);
  setTimeout(options.timeout);
}

namespace {
std::mutex living_mutex;
std::vector<c10::weak_intrusive_ptr<Backend>>& living() {
  static auto* all = new std::vector<c10::weak_intrusive_ptr<Backend>>;
  return *all;
}
}  // namespace

intrusive_ptr<Backend> Backend::make(intrusive_ptr<c10d::Store> store, int rank, int size,
                                     const Options& options, bool cpu_only, Named named) {
  auto made = c10::make_intrusive<Backend>(std::move(store), rank, size, options, cpu_only, std::move(named));
  std::lock_guard<std::mutex> lock(living_mutex);
  auto& all = living();
  all.erase(std::remove_if(all.begin(), all.end(), [](auto& weak) { return weak.expired(); }), all.end());
  all.emplace_back(made);
  return made;
}

// A thread that runs callbacks after the end of Python would end the process.
void Backend::end_all(bool abort) {
  std::vector<intrusive_ptr<Backend>> all;
  {
    std::lock_guard<std::mutex> lock(living_mutex);
    for (auto& weak : living())
      if (auto backend = weak.lock()) all.push_back(std::move(backend));
  }
  for (auto& backend : all) backend->leave(abort);
}

Backend::~Backend() { leave(true); }

// The destructor waits for the last weak reference.
void Backend::release_resources() { leave(true); }

void Backend::leave(bool abort) {
  if (home_.foreign()) return forsake(lanes_), forsake(messages_), forsake(coalesced_);
  final_.store(true);
  // Threads that this joins may need the GIL.
  const WithoutGil released;
  try {
    abort ? end(true) : shutdown();
  } catch (...) {
  }
}

void Backend::setTimeout(Milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "timeout is ", timeout.count(), "ms, expected more than 0");
  auto lock = entered();
  options_->timeout = std::min(timeout, kLongest);
}

// For a group made from this one, of the options that torch passes.
Backend::Options Backend::chosen(const intrusive_ptr<c10d::Backend::Options>& options) const {
  if (auto* own = dynamic_cast<const Options*>(options.get())) return *own;
  return Options(options ? options->timeout : options_->timeout, options_->is_high_priority_stream);
}

std::unique_lock<std::recursive_mutex> Backend::entered() {
  if (home_.foreign()) C10_THROW_ERROR(DistBackendError, kOfTheParent);
  return std::unique_lock<std::recursive_mutex>(mutex_);
}

void Backend::check_has_members() const {
  if (!store_)
    C10_THROW_ERROR(DistBackendError,
                    "pynccl: the process group has no members, since it was made with "
                    "enable_reconfigure=True; expected reconfigure first");
}

LanePtr Backend::lane(c10::Device device, int peer) {
  auto lock = entered();
  check_has_members();
  if (ended_.load()) C10_THROW_ERROR(DistBackendError, "pynccl: the process group was shut down or aborted");
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "pynccl works on cpu and cuda tensors, got ", device);
  const std::string name = peer < 0 ? device.str() : c10::str(device.str(), " with ", peer);
  auto found = lanes_.find(name);
  if (found == lanes_.end()) found = lanes_.emplace(name, open(device, peer)).first;
  return found->second;
}

// Ranks may open their lanes in any order and may have different device numbers. So the key contains only
// what is equal on all ranks.
LanePtr Backend::open(c10::Device device, int peer) {
  Provided provided = provide(device, options_->is_high_priority_stream);
  auto lane = std::make_shared<Lane>();
  lane->api = std::make_shared<const Api>(provided.addresses);
  lane->device = device;
  int same = 0;
  for (auto& [name, other] : lanes_) same += other->device.type() == device.type() && !other->paired;
  lane->key = c10::str("pynccl/", device.is_cpu() ? "cpu" : "cuda", "/", same);
  lane->rank = rank_, lane->size = size_;
  if (peer >= 0) {
    lane->key = c10::str("pynccl/cuda/pair/", std::min(peer, rank_), "/", std::max(peer, rank_));
    lane->paired = true, lane->rank = int(peer < rank_), lane->size = 2;
  }
  if (device.is_cpu()) {
    TORCH_CHECK(lane->api->pyncclCpuStreamCreateWithFlags, "CPU tensors need pynccl's CPU library");
    lane->queue = std::make_shared<Queue>(lane->api);
  } else {
    lane->stream = c10::Stream(c10::Stream::UNSAFE, device, provided.stream_id);
    lane->handle = reinterpret_cast<cudaStream_t>(provided.stream);
  }
  return lane;
}

std::shared_ptr<Attempt> Backend::connect(const Lane& lane) {
  return Attempt::begin(lane.api, [api = lane.api, device = lane.device, key = lane.key, tried = lane.tried,
                                   rank = lane.rank, size = lane.size, stores = *stores_](Attempt& attempt) {
    const StorePtr own = stores.take();
    const OwnStore& store = *own;
    store->set(presence(key, rank), std::vector<uint8_t>{1});
    auto id = exchange_id(*api, attempt, store, key, rank == 0, *tried);
    c10::OptionalDeviceGuard guard;
    if (!device.is_cpu()) guard.reset_device(device);
    return id ? attempt.init(size, *id, rank) : nullptr;
  });
}

LanePtr Backend::connected(c10::Device device, int peer, Milliseconds limit) {
  auto lock = entered();
  LanePtr lane = this->lane(device, peer);
  if (lane->comm) return lane;
  if (!lane->attempt) lane->attempt = connect(*lane);
  auto attempt = lane->attempt;
  if (limit == kOfTheGroup) limit = options_->timeout;
  lock.unlock();
  for (auto deadline = Clock::now() + limit; !attempt->wait(kSlice) && !attempt->stopped();) {
    check_signals();
    // The attempt continues, and the next operation waits for it again.
    if (Clock::now() >= deadline)
      C10_THROW_ERROR(DistBackendError, c10::str("pynccl: connecting rank ", rank_, " of ", size_, ", ",
                                                 here(), ", took longer than ", limit.count(), "ms",
                                                 peer < 0 ? absent(*stores_, lane->key, rank_, size_) : ""));
  }
  lock.lock();
  if (lane->attempt == attempt) {
    lane->attempt = nullptr;
    if (auto comm = attempt->stopped() ? nullptr : attempt->result()) {
      lane->comm = comm;
      if (lane->queue) lane->queue->connected(comm);
    }
  }
  if (!lane->comm) {
    attempt->stopped() ? std::rethrow_exception(shut_down()) : void(attempt->result());
    std::rethrow_exception(shut_down());
  }
  return lane;
}

TaskPtr Backend::make_task(Call& call, Milliseconds timeout) const {
  auto task = std::make_shared<Task>();
  task->name = call.name;
  task->timeout = timeout.count() > 0 ? std::min(timeout, kLongest) : options_->timeout;
  task->deadline = Clock::now() + task->timeout;
  task->inputs = call.inputs;
  task->outputs = call.outputs;
  return task;
}

namespace {

// ProcessGroupNCCL's name of an operation, by which tools know it.
std::string name_of_nccl(const Call& call) {
  static const std::map<std::string, std::string> others = {
      {"all_reduce", "allreduce"},
      {"all_gather_into_tensor", "_allgather_base"},
      {"all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced"},
      {"reduce_scatter_tensor", "_reduce_scatter_base"}};
  if (!call.input_splits.empty() || !call.output_splits.empty()) return "all_to_allv";
  auto found = others.find(call.name);
  return found == others.end() ? call.name : found->second;
}

// The difference of the group's global ranks; as in ProcessGroupNCCL -1 if it is not the same for all, and 0
// for one rank.
int stride_of(const std::vector<int64_t>& ranks) {
  if (ranks.size() < 2) return 0;
  for (size_t i = 2; i < ranks.size(); ++i)
    if (ranks[i] - ranks[i - 1] != ranks[1] - ranks[0]) return -1;
  return int(ranks[1] - ranks[0]);
}

}  // namespace

// As ProcessGroupNCCL does: an event with the group, its ranks, and the numbers of elements.
void Backend::describe_to_profiler(const Call& call) {
  if (!at::hasCallbacks()) return;
  auto elements = [](const Tensors& tensors) {
    int64_t sum = 0;
    for (auto& tensor : tensors) sum += tensor.defined() ? tensor.numel() : 0;
    return sum;
  };
  const bool message = call.type == OpType::SEND || call.type == OpType::RECV || call.peer >= 0 ||
                       call.type == OpType::RECVANYSOURCE;
  // ProcessGroupNCCL gives a message's tensor as both.
  auto& inputs = message && call.inputs.empty() ? call.outputs : call.inputs;
  auto& outputs = message && call.outputs.empty() ? call.inputs : call.outputs;
  auto& tensors = inputs.empty() ? outputs : inputs;
  auto dtype = tensors.empty() || !tensors[0].defined() ? at::kByte : tensors[0].scalar_type();
  RECORD_PARAM_COMMS_DATA(std::make_tuple(int64_t(sequence_) + 1, message),
                          std::make_tuple(pg_uid_, pg_desc_), inputs, outputs,
                          call.other >= 0 ? call.other : rank_, name_of_nccl(call), elements(inputs),
                          elements(outputs), dtype, call.input_splits, call.output_splits,
                          int(global_rank(0)), named_.ranks.empty() ? 1 : stride_of(named_.ranks), size_);
}

WorkPtr Backend::work_of(OpType type, const std::string& name, std::vector<TaskPtr> tasks) {
  if (!here_ || here_uid_ != pg_uid_ || here_desc_ != pg_desc_) {
    here_ = std::make_shared<const std::string>(here());
    here_uid_ = pg_uid_, here_desc_ = pg_desc_;
  }
  ++sequence_;
  return c10::make_intrusive<WorkPynccl>(rank_, type, "pynccl:" + name, std::move(tasks), sequence_, here_,
                                         hooks_);
}

WorkPtr Backend::launch(Call call, Milliseconds timeout, Pace pace) {
  LanePtr on = connected(call.device, call.peer);
  auto lock = entered();
  describe_to_profiler(call);
  OpType type = call.type;
  std::string name = call.name;
  TaskPtr task;
  if (coalesced_) {
    auto& calls = coalesced_->calls;
    TORCH_CHECK(calls.empty() || calls[0].device == call.device,
                "operations that are coalesced must be on one device, got ", call.device, " after ",
                calls.empty() ? call.device : calls[0].device);
    if (!coalesced_->task) {
      coalesced_->task = make_task(call, timeout);
      coalesced_->task->set_recording(true);
    }
    coalesced_->pace = std::max(coalesced_->pace, pace);
    task = coalesced_->task;
    calls.push_back(std::move(call));
  } else {
    task = make_task(call, timeout);
    start(*on, task, std::move(call), pace);
  }
  return work_of(type, name, {task});
}

// For exception handlers of operations. If a part of a group raises, torch leaves the group open, and would
// only record later operations. So the end of the group raises instead.
WorkPtr Backend::refused() {
  auto lock = entered();
  if (!coalesced_) throw;
  if (!coalesced_->refusal) coalesced_->refusal = std::current_exception();
  auto task = std::make_shared<Task>();
  task->set_recording(true);
  coalesced_->refused.push_back(task);
  return work_of(OpType::UNKNOWN, "refused", {task});
}

void Backend::start(Lane& on, const TaskPtr& task, Call call, Pace pace) {
  task->kept = std::move(call.kept);
  if (on.queue) {
    task->post = std::move(call.post);
    task->issue = std::move(call.issue);
    task->runner = on.queue;
    return on.queue->push(task, pace);
  }
  c10::impl::VirtualGuardImpl device(call.device.type());
  c10::DeviceGuard guard(call.device);
  c10::Event ready(call.device.type());
  ready.record(device.getStream(call.device));
  ready.block(*on.stream);
  for (auto* tensors : {&call.inputs, &call.outputs, &task->kept})
    for (auto& tensor : *tensors)
      if (tensor.defined() && tensor.device() == call.device)
        device.recordDataPtrOnStream(tensor.storage().data_ptr(), *on.stream);
  on.comm->check(call.issue(*on.api, on.comm->handle(), on.handle), call.name);
  c10::StreamGuard on_stream(*on.stream);
  if (call.post) call.post();
  auto end = std::make_unique<c10::Event>(call.device.type());
  end->record(*on.stream);
  task->issued(std::move(end), *on.stream, on.comm);
  auto gone = [](const std::weak_ptr<Task>& weak) {
    auto held = weak.lock();
    return !held || held->done() || held->end()->query();
  };
  while (!on.issued.empty() && gone(on.issued.front())) on.issued.pop_front();
  on.issued.push_back(task);
}

Call Backend::merged(std::vector<Call> calls, OpType type, std::string name) const {
  Call all;
  all.type = type, all.name = std::move(name), all.device = calls.front().device;
  for (auto& call : calls) {
    all.inputs.insert(all.inputs.end(), call.inputs.begin(), call.inputs.end());
    all.outputs.insert(all.outputs.end(), call.outputs.begin(), call.outputs.end());
    all.kept.insert(all.kept.end(), call.kept.begin(), call.kept.end());
  }
  auto parts = std::make_shared<std::vector<Call>>(std::move(calls));
  all.issue = [parts](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return grouped(api, [&] {
      for (auto& part : *parts)
        if (ncclResult_t r = part.issue(api, comm, stream); failed(r)) return r;
      return ncclSuccess;
    });
  };
  all.post = [parts] {
    for (auto& part : *parts)
      if (part.post) part.post();
  };
  return all;
}

namespace {

void fail_all(const Coalesced& group, std::exception_ptr error) {
  for (auto& task : group.parts()) {
    task->set_recording(false);
    task->fail(error);
  }
}

void begin_messages(const Coalesced& group) {
  for (auto& [task, begin] : group.messages) {
    task->set_recording(false);
    try {
      begin();
    } catch (...) {
      task->fail(std::current_exception());
    }
  }
  // A wait for the batch waits for the messages one after another.
  for (auto& task : group.parts()) task->hurry();
}

}  // namespace

void Backend::startCoalescing() {
  auto lock = entered();
  if (coalesced_)
    // torch does not nest groups, so an exception has left this one open.
    fail_all(*coalesced_, error_of("pynccl: an exception left the group of this operation"));
  coalesced_.emplace();
}

WorkPtr Backend::endCoalescing() {
  auto lock = entered();
  TORCH_CHECK(coalesced_, "endCoalescing without startCoalescing");
  Coalesced group = std::move(*coalesced_);
  coalesced_.reset();
  if (group.refusal) {
    fail_all(group, group.refusal);
    std::rethrow_exception(group.refusal);
  }
  if (group.task) {
    Call call = merged(std::move(group.calls), OpType::COALESCED, "coalesced");
    group.task->set_recording(false);
    group.task->inputs = call.inputs, group.task->outputs = call.outputs;
    try {
      start(*lane(call.device), group.task, std::move(call), group.pace);
    } catch (...) {
      fail_all(group, std::current_exception());
      throw;
    }
  }
  auto tasks = group.parts();
  if (tasks.empty()) {
    tasks.push_back(std::make_shared<Task>());
    tasks.back()->succeed();
  }
  auto work = work_of(OpType::COALESCED, "coalesced", std::move(tasks));
  lock.unlock();
  begin_messages(group);
  return work;
}

#ifdef PYNCCL_HAS_ERROR_TYPE
c10d::ErrorType Backend::getError() {
  auto lock = entered();
  for (auto& lane : all_lanes()) {
    ncclResult_t state = lane->comm ? lane->comm->state() : ncclSuccess;
    if (state == ncclRemoteError) return c10d::ErrorType::REMOTE_ERROR;
    if (failed(state)) return c10d::ErrorType::COMM_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}
#endif

std::vector<LanePtr> Backend::all_lanes() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<LanePtr> all;
  for (auto& [name, lane] : lanes_) all.push_back(lane);
  return all;
}

std::vector<TaskPtr> Backend::unfinished() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<TaskPtr> tasks = messages_ ? messages_->open() : std::vector<TaskPtr>();
  for (auto& lane : all_lanes()) {
    if (lane->queue)
      for (auto& task : lane->queue->open()) tasks.push_back(task);
    for (auto& weak : lane->issued)
      if (auto task = weak.lock(); task && !task->done()) tasks.push_back(task);
  }
  return tasks;
}

void Backend::finish_all(const std::string& name) {
  for (auto& task : unfinished()) {
    task->hurry();
    while (!task->await(kSlice)) {
      check_signals();
      if (Clock::now() >= task->deadline)
        C10_THROW_ERROR(DistBackendError, c10::str("pynccl: ", name, " waits for operations in flight, and ",
                                                   task->name, " has timed out"));
    }
  }
}

// NCCL has no time-out for such a call: the ranks have met before.
void Backend::for_each_comm(const std::string& name, const CommCall& call) {
  // The other ranks' threads may need the GIL before they come.
  const WithoutGil released;
  for (auto& lane : all_lanes()) {
    if (!lane->comm || lane->paired) continue;
    bounded(
        [=, comm = lane->comm] {
          c10::OptionalDeviceGuard guard;
          if (!lane->device.is_cpu()) guard.reset_device(lane->device);
          comm->check(call(*lane, comm->handle()), name);
        },
        options_->timeout, c10::str(name, " on ", here()), true,
        [comm = lane->comm] { return comm->waits_for(); });
  }
}

void Backend::suspend() {
  const std::string name = "suspend";
  meet(name);
  for_each_comm(name, [](Lane& lane, ncclComm_t comm) {
    return PYNCCL_KNOWN(*lane.api, ncclCommSuspend)(comm, NCCL_SUSPEND_MEM);
  });
}

void Backend::resume() {
  const std::string name = "resume";
  meet(name);
  for_each_comm(name,
                [](Lane& lane, ncclComm_t comm) { return PYNCCL_KNOWN(*lane.api, ncclCommResume)(comm); });
}

// The keys are those of ProcessGroupNCCL.
std::unordered_map<std::string, uint64_t> Backend::getMemoryStats() {
  finish_all("memory_stats");
  std::unordered_map<std::string, uint64_t> stats;
  for (auto [name, stat] : {std::pair("suspend", ncclStatGpuMemSuspend),
                            {"suspended", ncclStatGpuMemSuspended},
                            {"persist", ncclStatGpuMemPersist},
                            {"total", ncclStatGpuMemTotal}})
    for (auto& lane : all_lanes()) {
      if (!lane->comm || lane->paired) continue;
      uint64_t value = 0;
      lane->comm->check(PYNCCL_KNOWN(*lane->api, ncclCommMemStats)(lane->comm->handle(), stat, &value),
                        "ncclCommMemStats");
      stats[name] += value;
    }
  return stats;
}

#ifdef PYNCCL_HAS_HOOKS
void Backend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  hooks_->add_completed(id, [hook = std::move(hook)](uint64_t key) { hook({key, std::nullopt}); });
}
#endif

void Backend::abort() { end(true); }

// Lets operations in flight complete first.
void Backend::shutdown() {
  if (home_.foreign()) return;
  final_.store(true);
  bool finished = true;
  auto until = Clock::now() + kEndSeconds;
  for (auto& task : unfinished()) {
    task->hurry();
    while (!task->await(Milliseconds(10)))
      if (Clock::now() >= std::min(until, task->deadline)) {
        finished = false;
        break;
      }
  }
  end(!finished);
}

void Backend::end(bool abort) {
  if (home_.foreign() || ended_.exchange(true)) return;
  struct Release {
    std::atomic<bool>& released;
    ~Release() { released.store(true); }
  } at_return{released_};
  if (abort) hooks_->failing();
  auto lanes = all_lanes();
  std::shared_ptr<Messages> messages;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    lanes_.clear();
    messages = messages_;
    for (auto& lane : lanes)
      if (lane->attempt) lane->attempt->stop();
  }
  try {
    // Over the store's open connection: a new one to a store that has ended takes long to fail. Another
    // thread may be using it.
    if (size_ > 1)
      bounded(
          [stores = *stores_, rank = rank_] {
            if (stores.ended().empty()) Leavers::add(*stores.group(), rank);
          },
          kLeaveSeconds, "", false);
  } catch (const std::exception&) {  // the store has ended, and the ranks that wait in it notice that
  }
  const auto why = shut_down();
  auto close = [lanes, messages, why, abort] {
    if (messages) messages->close(why, abort);
    for (auto& lane : lanes) {
      if (lane->queue) lane->queue->close(why, abort);
      if (lane->comm) lane->comm->end(abort);
    }
  };
  std::exception_ptr error;
  try {
    bounded(close, kEndSeconds, abort ? "abort" : "shutdown", false);
  } catch (...) {
    error = std::current_exception();
  }
  if (messages) messages->stop(why);
  for (auto& lane : lanes) {
    if (lane->queue) lane->queue->stop(why);
    for (auto& weak : lane->issued)
      if (auto task = weak.lock(); task && !task->advance(Milliseconds(100))) task->fail(why);
  }
  if (error) std::rethrow_exception(error);
}

// A call of all ranks of this group. torch passes a store with the same prefix for every group of these
// ranks, even after a restart of all ranks.
intrusive_ptr<c10d::Backend> Backend::split(const intrusive_ptr<c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const intrusive_ptr<c10d::Backend::Options>& options) {
  auto at = std::find(ranks.begin(), ranks.end(), rank_);
  const int rank = at == ranks.end() ? -1 : int(at - ranks.begin());
  auto lock = entered();
  check_has_members();
  // torch calls this once for each device type, although one backend serves all of them.
  if (split_store_ == store && split_ranks_ == ranks)
    if (auto before = split_.lock(); before || rank < 0) return before;
  lock.unlock();
  meet("split_group", ranks, [&] { check_members(ranks); });
  lock.lock();
  split_store_ = store, split_ranks_ = ranks;
  intrusive_ptr<Backend> made;
  if (rank >= 0) {
    ++splits_;
    std::string key = "pynccl/split";
    for (int r : ranks) key += c10::str("-", r);
    auto where = c10::make_intrusive<c10d::PrefixStore>(c10::str(key, "/", split_counts_[ranks]++), store_);
    made = make(where, rank, int(ranks.size()), chosen(options), cpu_only_, named_of(ranks));
  }
  lock.unlock();
  RECORD_FUNCTION("pynccl:split_group", c10::ArrayRef<const c10::IValue>());
  const int color = rank < 0 ? NCCL_SPLIT_NOCOLOR : *std::min_element(ranks.begin(), ranks.end());
  for_each_comm("split_group", [color, rank, made](Lane& lane, ncclComm_t comm) {
    // Without it the new group connects through the store, at its first use.
    if (!lane.api->ncclCommSplit) return ncclSuccess;
    auto handle = std::make_shared<ncclComm_t>();
    ncclResult_t result = lane.api->ncclCommSplit(comm, color, std::max(rank, 0), handle.get(), nullptr);
    lane.comm->check(result, "split_group");
    if (made) made->adopt(lane.device, std::make_shared<Comm>(lane.api, *handle));
    return ncclSuccess;
  });
  lock.lock();
  split_ = c10::weak_intrusive_ptr<c10d::Backend>(intrusive_ptr<c10d::Backend>(made));
  return made;
}

void Backend::check_members(const std::vector<int>& ranks) const {
  for (int rank : ranks)
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "split_group: ranks is ", in_brackets(ranks),
                      ", expected ranks of the group, from 0 to ", size_ - 1, ", got ", rank);
}

// A communicator that another group has made for this one.
void Backend::adopt(c10::Device device, CommPtr comm) {
  auto lock = entered();
  LanePtr on = lane(device);
  int count = 0;
  // Where another rank has dropped its new group already, the first operation says so.
  const bool known = !failed(comm->settle(on->api->ncclCommCount(comm->handle(), &count)));
  // Operations would write behind the end of their tensors.
  if (known && count != size_)
    C10_THROW_ERROR(DistBackendError, c10::str("pynccl: the communicator for ", here(), " has ", count,
                                               " ranks, expected ", size_));
  on->comm = comm;
  if (on->queue) on->queue->connected(comm);
}

Named Backend::named_of(const std::vector<int>& ranks) const {
  Named named{c10::str(named_.name, ":split"), {}};
  for (int rank : ranks) named.ranks.push_back(global_rank(rank));
  return named;
}

int64_t Backend::global_rank(int rank) const {
  return named_.ranks.empty() ? rank : named_.ranks[size_t(rank)];
}

// For errors. torch names a group only after its backend is created.
std::string Backend::here() const {
  const std::string& name = pg_uid_.empty() ? named_.name : pg_uid_;
  std::string text = c10::str("rank ", rank_, " of group '", name, "'");
  if (!pg_desc_.empty() && pg_desc_ != "undefined") text += " (" + pg_desc_ + ")";
  if (global_rank(rank_) != rank_) text += c10::str(", which is global rank ", global_rank(rank_));
  return text;
}

// The survivors' communicators, made from this group's.
intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& excluded, int flags,
                                             const intrusive_ptr<c10d::Backend::Options>& options) {
  check_has_members();
  std::vector<int> out(excluded.begin(), excluded.end());
  std::sort(out.begin(), out.end());
  TORCH_CHECK_VALUE(!std::binary_search(out.begin(), out.end(), rank_), "rank ", rank_,
                    " is excluded itself");
  int rank = rank_ - int(std::lower_bound(out.begin(), out.end(), rank_) - out.begin());
  const Options own = chosen(options);
  std::string key = "pynccl/shrunk";
  for (int r : out) key += c10::str("-", r);
  std::vector<int> stay;
  for (int r = 0; r < size_; ++r)
    if (!std::binary_search(out.begin(), out.end(), r)) stay.push_back(r);
  auto made = make(c10::make_intrusive<c10d::PrefixStore>(key, store_), rank, int(stay.size()), own,
                   cpu_only_, named_of(stay));
  auto lock = entered();
  for (auto& lane : all_lanes()) {
    if (!lane->comm || lane->paired) continue;
    TORCH_CHECK(lane->api->ncclCommShrink, "shrinking needs NCCL " PYNCCL_SINCE_ncclCommShrink " or newer");
    auto shrunk = std::make_shared<CommPtr>();
    bounded(
        [=, parent = lane->comm]() mutable {
          ncclComm_t handle = nullptr;
          auto& api = parent->api();
          ncclResult_t result =
              api.ncclCommShrink(parent->handle(), out.data(), int(out.size()), &handle, nullptr, flags);
          api.check(result, "ncclCommShrink", parent->handle());
          *shrunk = std::make_shared<Comm>(lane->api, handle);
          (*shrunk)->check(result, "ncclCommShrink");
        },
        own.timeout, "shrink", true);
    made->adopt(lane->device, *shrunk);
  }
  return made;
}

}  // namespace pynccl
