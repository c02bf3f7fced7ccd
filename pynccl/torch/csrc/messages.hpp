// Point-to-point messages between CPU tensors. Each direction of each pair of ranks has a communicator of its
// own, made when both ends want it. A message is a header (its size and tag), then its data. The receiver
// takes messages in the order of arrival while it waits for one from that rank, and keeps those that no
// receive wants yet: messages with different tags never wait for each other.
#pragma once

#include <future>
#include <map>
#include <regex>
#include <set>

#include "runner.hpp"

namespace pynccl {

constexpr int kAnySource = -1;
// On the store; torch counts its milliseconds in an int.
constexpr Milliseconds kLongWait = std::chrono::hours(24);
constexpr Milliseconds kLookForLeavers{500};

// How errors name this rank and others. `global` are the global ranks; empty: use the group's own.
struct Names {
  std::string here;  // this rank and the group
  int size;
  std::vector<int64_t> global;

  std::string of(int rank) const {
    const int64_t number = global.empty() ? rank : global[size_t(rank)];
    return number == rank ? c10::str("rank ", rank) : c10::str("rank ", rank, " (global rank ", number, ")");
  }

  // The communicator of a pair calls the sender rank 0 of 2, and the receiver rank 1.
  Wording of_pair(int sender, int receiver) const {
    return [names = *this, sender, receiver](const std::string& what, const std::string& text) {
      static const std::regex pattern("\\brank ([01])\\b( of 2\\b)?");
      std::string worded = what + " on " + names.here + ": ";
      auto rest = text.begin();
      for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at) {
        const int rank = *(*at)[1].first == '0' ? sender : receiver;
        worded.append(rest, (*at)[0].first);
        worded += (*at)[2].matched ? c10::str("rank ", rank, " of ", names.size) : names.of(rank);
        rest = (*at)[0].second;
      }
      return worded.append(rest, text.end());
    };
  }
};

// The ranks that have left a group say so in its store: a rank that leaves without an error ends no
// communicator of those that never exchanged a message with it.
class Leavers {
 public:
  // TCPStore prints a stack of C++ if its server ends before it answers; set() has no answer.
  static void add(c10d::Store& store, int rank) { store.set(key(rank), std::vector<uint8_t>{1}); }
  static bool has(c10d::Store& store, int rank) { return store.check({key(rank)}); }

 private:
  static std::string key(int rank) { return c10::str("pynccl/left/", rank); }
};

// Watches a peer while this rank waits for its connection: only the group's communicator notices its death.
class Watch {
 public:
  Watch(std::shared_ptr<const Runner> group, const Names& names, int peer)
      : group_(std::move(group)),
        title_(c10::str("pynccl: connecting with ", names.of(peer), " for messages on ", names.here, ": ")),
        peer_(peer) {}

  void check() {
    CommPtr comm = group_->comm();
    const std::string trouble = comm ? comm->trouble() : "";
    if (trouble.empty()) return;
    if (!since_) since_ = Clock::now();
    if (comm->is_gone(peer_) || Clock::now() - *since_ > kGrace)
      C10_THROW_ERROR(DistBackendError, title_ + trouble);
  }

  // Waits for a key that the peer sets. False: the attempt was stopped.
  bool await(c10d::Store& store, const std::string& key, const Attempt& attempt) {
    // A store connection can wait for only one key.
    for (auto pause = std::chrono::microseconds(50); !attempt.stopped(); pause += pause / 4) {
      check();
      if (store.check({key})) return !attempt.stopped();
      // It may have set the key before it left.
      if (Leavers::has(store, peer_) && !store.check({key}))
        C10_THROW_ERROR(DistBackendError, title_ +
                                              "it has left the group: its program has ended, or it "
                                              "has destroyed the group");
      pause = std::min<std::chrono::microseconds>(pause, Milliseconds(200));
      std::this_thread::sleep_for(pause);
    }
    return false;
  }

  // torch tries until the group's time-out to reach a store that has ended.
  void check_server(const std::string& server) const {
    if (!server.empty())
      C10_THROW_ERROR(DistBackendError, c10::str(title_, "the store at ", server,
                                                 " is gone, which ranks need for their first message to each "
                                                 "other: the process that served it, rank 0 of the program "
                                                 "or a launcher, has ended"));
  }

  // After another error: a store that died with the peer is lost a moment before the death is known.
  void explain() {
    for (auto until = Clock::now() + kMoment; Clock::now() < until; std::this_thread::sleep_for(kSlice / 10))
      check();
  }

 private:
  static constexpr std::chrono::seconds kMoment{1};
  // If the group has another error the peer may still connect. But a communicator reports only its first
  // error, and the peer may die next.
  static constexpr std::chrono::seconds kGrace{5};

  const std::shared_ptr<const Runner> group_;
  const std::string title_;
  const int peer_;
  std::optional<Clock::time_point> since_;
};

struct Header {
  uint64_t size;
  int64_t tag;
};

// The receives and messages of one rank that have not matched yet.
class Mail {
 public:
  // For a rank with this many peers.
  explicit Mail(int peers) : peers_(size_t(peers)) {}

  struct Message {
    Header header;
    int source;
    uint64_t order;
    at::Tensor buffer;  // without a receive, or if the receive has another size
    TaskPtr task;       // the receive
    at::Tensor target;  // its tensor
    bool whole = false;
    void* data() const { return buffer.defined() ? buffer.data_ptr() : target.data_ptr(); }
  };
  using MessagePtr = std::shared_ptr<Message>;

  // Takes the oldest matching message if it has arrived completely. Otherwise the receive is queued.
  MessagePtr ask(const TaskPtr& task, const at::Tensor& target, int source, int64_t tag) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = oldest(source, tag);
    if (at == kept_.end()) {
      receives_[{source, tag}].push_back({task, target, ++orders_});
      ++asked_[source];
      return nullptr;
    }
    MessagePtr message = at->second.front();
    at->second.pop_front();
    if (at->second.empty()) kept_.erase(at);
    message->task = task, message->target = target;
    task->source.store(message->source);
    return message->whole ? message : nullptr;
  }

  // A header has arrived.
  MessagePtr come(int source, Header header) {
    auto message = std::make_shared<Message>();
    message->header = header, message->source = source;
    std::lock_guard<std::mutex> lock(mutex_);
    message->order = ++orders_;
    auto at = eldest(source, header.tag);
    if (at != receives_.end()) {
      auto& receive = at->second.front();
      message->task = receive.task, message->target = receive.target;
      message->task->source.store(source);
      forget(at, 1);
    }
    if (message->task && message->target.nbytes() == header.size) return message;
    message->buffer = at::empty({int64_t(header.size)}, at::kByte);
    if (!message->task) kept_[{source, header.tag}].push_back(message);
    return message;
  }

  // The data has arrived. Returns its receive, if there is one.
  TaskPtr complete(const MessagePtr& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    message->whole = true;
    return message->task;
  }

  // Copies a message that arrived before its receive.
  static std::exception_ptr hand_over(const Message& message) {
    try {
      const size_t expected = message.target.nbytes();
      if (message.header.size != expected)
        C10_THROW_ERROR(DistBackendError, c10::str("pynccl: recv: the tensor has ", expected,
                                                   " bytes, but the message of rank ", message.source,
                                                   " has ", message.header.size));
      if (message.buffer.defined() && expected)
        std::memcpy(message.target.data_ptr(), message.buffer.data_ptr(), expected);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  // Whether a receive waits for a message of this rank.
  bool wanted(int source) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return asked_.count(source) || asked_.count(kAnySource);
  }
  // Marks a rank that sends no more. True: no rank is left.
  bool lose(int source) {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_.insert(source);
    return lost_.size() == peers_;
  }
  std::vector<TaskPtr> asking(int source) const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<TaskPtr> tasks;
    for (auto& [key, queue] : receives_)
      if (key.first == source)
        for (auto& receive : queue) tasks.push_back(receive.task);
    return tasks;
  }
  void forget(int source) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = receives_.begin(); at != receives_.end();) {
      auto next = std::next(at);
      if (at->first.first == source) forget(at, at->second.size());
      at = next;
    }
  }

 private:
  struct Receive {
    TaskPtr task;
    at::Tensor target;
    uint64_t order;
  };
  using Key = std::pair<int, int64_t>;  // source and tag
  using Receives = std::map<Key, std::deque<Receive>>;
  using Kept = std::map<Key, std::deque<MessagePtr>>;

  Kept::iterator oldest(int source, int64_t tag) {
    if (source != kAnySource) return kept_.find({source, tag});
    auto best = kept_.end();
    for (auto at = kept_.begin(); at != kept_.end(); ++at)
      if (at->first.second == tag &&
          (best == kept_.end() || at->second.front()->order < best->second.front()->order))
        best = at;
    return best;
  }

  Receives::iterator eldest(int source, int64_t tag) {
    auto named = receives_.find({source, tag}), any = receives_.find({kAnySource, tag});
    if (named == receives_.end() || any == receives_.end()) return named == receives_.end() ? any : named;
    return named->second.front().order < any->second.front().order ? named : any;
  }

  void forget(Receives::iterator at, size_t count) {
    auto left = asked_.find(at->first.first);
    if ((left->second -= count) == 0) asked_.erase(left);
    at->second.erase(at->second.begin(), at->second.begin() + ptrdiff_t(count));
    if (at->second.empty()) receives_.erase(at);
  }

  mutable std::mutex mutex_;
  uint64_t orders_ = 0;
  Receives receives_;
  Kept kept_;
  std::map<int, size_t> asked_;  // receives by source
  std::set<int> lost_;
  const size_t peers_;
};

// The messages from one rank to this one.
class Inbox final : public Runner {
 public:
  Inbox(ApiPtr api, std::shared_ptr<Mail> mail, int source)
      : Runner(std::move(api)), mail_(std::move(mail)), source_(source) {}

  // A receive was queued.
  void look(Pace pace) {
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_ && busy()) expect(pace);
      error = error_;
    }
    if (error) refuse(error);
  }

  // With the final error of the connection.
  void refuse(std::exception_ptr error) {
    std::vector<TaskPtr> tasks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = error;
      tasks = lose();
    }
    for (auto& task : tasks) task->fail(error);
  }

 private:
  enum class At { Rest, Header, Data };

  bool busy() const override { return at_ == At::Data || mail_->wanted(source_); }
  std::vector<TaskPtr> left() const override {
    auto tasks = mail_->asking(source_);
    if (message_ && message_->task) tasks.push_back(message_->task);
    return tasks;
  }
  void forget() override { mail_->forget(source_); }
  bool midway() const override { return at_ != At::Rest; }

  void step(Milliseconds slice, AllFinished& finished) override {
    try {
      if (at_ == At::Rest) {
        receive(&header_, sizeof header_);
        move_to(At::Header);
      }
      if (!arrived(slice)) return;
      if (at_ == At::Header) {
        move_to(At::Data, mail_->come(source_, header_));
        if (header_.size) receive(message_->data(), header_.size);
        if (header_.size && !arrived(slice)) return;
      }
      auto message = message_;
      move_to(At::Rest);
      if (TaskPtr task = mail_->complete(message)) finished.push_back({task, Mail::hand_over(*message)});
    } catch (...) {
      fail_all(std::current_exception(), finished);
    }
  }

  void receive(void* data, size_t size) {
    comm_->check(api_->ncclRecv(data, size, ncclUint8, 0, comm_->handle(), stream_), "recv");
  }

  bool arrived(Milliseconds slice) {
    ncclResult_t result = synchronize(slice);
    if (result == ncclInProgress) return false;
    if (failed(result)) std::rethrow_exception(failure(result, "recv"));
    return true;
  }

  // For other threads: whether there is work, and for which task.
  void move_to(At at, Mail::MessagePtr message = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    at_ = at;
    message_.swap(message);
  }

  // Receives whose messages cannot arrive any more. Under the lock.
  std::vector<TaskPtr> lose() {
    auto tasks = left();
    forget();
    if (!mail_->lose(source_)) return tasks;
    for (auto& task : mail_->asking(kAnySource)) tasks.push_back(task);
    mail_->forget(kAnySource);
    return tasks;
  }

  void fail_all(std::exception_ptr error, AllFinished& finished) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = error;
    for (auto& task : lose()) finished.push_back({task, error_});
    message_ = nullptr, at_ = At::Rest;
  }

  std::shared_ptr<Mail> mail_;
  const int source_;
  At at_ = At::Rest;
  Header header_{};
  Mail::MessagePtr message_;
};

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  // `group` runs the collectives.
  Messages(ApiPtr api, Stores stores, std::shared_ptr<const Runner> group, int rank, Names names)
      : api_(std::move(api)),
        stores_(std::move(stores)),
        group_(std::move(group)),
        rank_(rank),
        mail_(std::make_shared<Mail>(names.size - 1)),
        names_(std::move(names)) {}

  void send(const TaskPtr& task, const at::Tensor& data, int peer, int64_t tag, Pace pace) {
    auto header = std::make_shared<Header>(Header{data.nbytes(), tag});
    if (peer == rank_) return keep(task, data, *header);
    auto out = outbox(peer);
    task->runner = out;
    task->issue = [header, data](const Api& api, ncclComm_t comm, cudaStream_t stream) {
      return grouped(api, [&] {
        ncclResult_t r = api.ncclSend(header.get(), sizeof *header, ncclUint8, 1, comm, stream);
        if (failed(r) || !header->size) return r;
        return api.ncclSend(data.data_ptr(), header->size, ncclUint8, 1, comm, stream);
      });
    };
    out->push(task, together(task, pace));
  }

  void receive(const TaskPtr& task, const at::Tensor& data, int source, int64_t tag, Pace pace) {
    std::shared_ptr<Inbox> in;
    if (source != kAnySource && source != rank_) task->runner = in = inbox(source);
    if (auto message = mail_->ask(task, data, source, tag)) return task->finish(Mail::hand_over(*message));
    if (in) return in->look(together(task, pace));
    if (source == rank_) return;
    // The message may come from any rank.
    std::map<int, std::shared_ptr<Inbox>> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      all = in_;
    }
    for (auto& [peer, one] : all) one->look(Pace::Now);
    listen();
  }

  std::vector<TaskPtr> open() {
    std::vector<TaskPtr> tasks = mail_->asking(kAnySource);
    for (auto& task : mail_->asking(rank_)) tasks.push_back(task);
    for (auto& runner : runners())
      for (auto& task : runner->open()) tasks.push_back(task);
    return tasks;
  }

  void close(std::exception_ptr error, bool abort) {
    std::vector<std::shared_ptr<Attempt>> attempts;
    std::string awaited;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = error;
      attempts.swap(attempts_);
      if (listening_) awaited = next_sender();
    }
    for (auto& attempt : attempts) attempt->stop();
    if (!awaited.empty()) stores_.wake(awaited);
    for (auto& runner : runners()) runner->close(error, abort);
  }

  void stop(std::exception_ptr error) {
    for (auto& runner : runners()) runner->stop(error);
    for (int source : {kAnySource, rank_}) {
      auto tasks = mail_->asking(source);
      mail_->forget(source);
      for (auto& task : tasks) task->fail(error);
    }
  }

 private:
  std::vector<std::shared_ptr<Runner>> runners() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Runner>> all;
    for (auto& [peer, runner] : out_) all.push_back(runner);
    for (auto& [peer, runner] : in_) all.push_back(runner);
    return all;
  }

  // A message to this rank itself is delivered immediately, or kept.
  void keep(const TaskPtr& task, const at::Tensor& data, Header header) {
    auto message = mail_->come(rank_, header);
    if (header.size) std::memcpy(message->data(), data.data_ptr(), header.size);
    if (TaskPtr receiver = mail_->complete(message)) receiver->finish(Mail::hand_over(*message));
    task->succeed();
  }

  // A caller that starts a second message has not waited for the first: run both concurrently.
  Pace together(const TaskPtr& task, Pace pace) {
    std::lock_guard<std::mutex> lock(mutex_);
    TaskPtr before = newest_.lock();
    newest_ = task;
    if (!before || before->done() || pace == Pace::Now) return pace;
    before->hurry();
    return Pace::Now;
  }

  std::shared_ptr<Queue> outbox(int peer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& found = out_[peer];
    if (!found) connect(found = std::make_shared<Queue>(api_), peer, true);
    return found;
  }

  std::shared_ptr<Inbox> inbox(int peer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& found = in_[peer];
    if (!found) connect(found = std::make_shared<Inbox>(api_, mail_, peer), peer, false);
    return found;
  }

  // Both ends announce themselves in the store, so that neither waits in NCCL for the other. Under the lock.
  template <class Box>
  void connect(const std::shared_ptr<Box>& box, int peer, bool sends) {
    if (error_) return box->refuse(error_);
    const std::string key = c10::str("pynccl/p2p/", sends ? rank_ : peer, "/", sends ? peer : rank_, "/");
    auto wording = names_.of_pair(sends ? rank_ : peer, sends ? peer : rank_);
    auto make = [api = api_, stores = stores_, rank = rank_, peer, sends, key, wording,
                 watch = Watch(group_, names_, peer)](Attempt& attempt) mutable -> CommPtr {
      const StorePtr own = reach(stores, attempt, watch);
      if (!own) return nullptr;
      const OwnStore& store = *own;
      ncclUniqueId id;
      if (sends) {
        api->check(api->ncclGetUniqueId(&id), "ncclGetUniqueId");
        const char* bytes = id.internal;
        store->set(key + "sender", std::vector<uint8_t>(bytes, bytes + sizeof id));
        // For receivers from any source.
        const auto number = store->add(senders_to(peer), 1);
        store->set(c10::str(senders_to(peer), "/", number), std::to_string(rank));
        if (!watch.await(*store, key + "receiver", attempt)) return nullptr;
      } else {
        store->set(key + "receiver", std::vector<uint8_t>{1});
        if (!watch.await(*store, key + "sender", attempt)) return nullptr;
        auto bytes = store->get(key + "sender");
        std::copy(bytes.begin(), bytes.end(), id.internal);
      }
      const std::vector<int> pair{sends ? rank : peer, sends ? peer : rank};
      return attempt.init(2, id, sends ? 0 : 1, wording, pair, [&watch] { watch.check(); });
    };
    auto explained = [make, stores = stores_, watch = Watch(group_, names_, peer)](Attempt& attempt) mutable {
      try {
        return make(attempt);
      } catch (const c10::DistBackendError&) {
        watch.explain();
        throw;
      } catch (const std::exception&) {  // of the store
        watch.explain();
        watch.check_server(stores.ended(Milliseconds(0)));
        throw;
      }
    };
    attempts_.push_back(Attempt::begin(api_, explained, [box](CommPtr comm, std::exception_ptr error) {
      if (comm) try {
          return box->connected(std::move(comm));
        } catch (...) {
          error = std::current_exception();
        }
      if (error) box->refuse(error);
    }));
  }

  // Connects to the store in a thread of its own, since its server may end meanwhile.
  static StorePtr reach(const Stores& stores, const Attempt& attempt, Watch& watch) {
    watch.check_server(stores.ended());
    if (StorePtr made = stores.made_common()) return made;
    auto made = std::make_shared<std::promise<StorePtr>>();
    std::thread([stores, made] { made->set_value(stores.common()); }).detach();
    auto own = made->get_future();
    while (own.wait_for(kSlice) != std::future_status::ready) {
      if (attempt.stopped()) return nullptr;
      watch.check();
      watch.check_server(stores.ended());
    }
    return own.get();
  }

  static std::string senders_to(int rank) { return c10::str("pynccl/p2p/to/", rank); }

  // Opens inboxes as senders come, from the first receive from any source on.
  void listen() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (listening_ || error_) return;
    listening_ = true;
    std::thread([self = shared_from_this()] {
      try {
        const StorePtr own = self->stores_.another();
        const OwnStore& store = *own;
        for (;;) {
          std::string key;
          {
            std::lock_guard<std::mutex> lock(self->mutex_);
            key = self->next_sender();
          }
          if (!store.await(key, kLongWait, [&] { return self->closed(); })) return;
          auto bytes = store->get(key);
          self->heard(std::stoi(std::string(bytes.begin(), bytes.end())));
        }
      } catch (...) {  // the store is gone: no new sender can connect
      }
    }).detach();
    std::thread([self = shared_from_this()] {
      try {
        self->look_for_leavers();
      } catch (...) {  // the store is gone
      }
    }).detach();
  }

  // A receive from any source fails when all other ranks have left or died, in whatever order. The inbox of
  // such a rank finds out whether a message is still to come.
  void look_for_leavers() {
    const StorePtr store = stores_.common();
    for (int rank = 0; rank < names_.size; ++rank) {
      if (rank == rank_) continue;
      while (!mail_->wanted(kAnySource) || !is_gone(**store, rank)) {
        if (closed()) return;
        std::this_thread::sleep_for(kLookForLeavers);
      }
      inbox(rank)->look(Pace::Now);
    }
  }

  bool is_gone(c10d::Store& store, int rank) const {
    CommPtr comm = group_->comm();
    return (comm && comm->is_gone(rank)) || Leavers::has(store, rank);
  }

  bool closed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return bool(error_);
  }
  std::string next_sender() const { return c10::str(senders_to(rank_), "/", heard_ + 1); }

  void heard(int source) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++heard_;
    }
    inbox(source)->look(Pace::Now);
  }

  ApiPtr api_;
  const Stores stores_;
  const std::shared_ptr<const Runner> group_;
  const int rank_;
  const std::shared_ptr<Mail> mail_;
  const Names names_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::map<int, std::shared_ptr<Queue>> out_;
  std::map<int, std::shared_ptr<Inbox>> in_;
  std::vector<std::shared_ptr<Attempt>> attempts_;
  bool listening_ = false;
  int64_t heard_ = 0;  // number of senders read from the store
  std::weak_ptr<Task> newest_;
};

}  // namespace pynccl
