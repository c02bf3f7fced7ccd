#include "service/join.hpp"

#include <condition_variable>
#include <deque>

#include "service/dial.hpp"
#include "service/process.hpp"

namespace pncpu {
namespace {

struct Message {
  CtlHeader header;
  Blob body;
};

// The connection of a joining rank to a root.
class Talk {
 public:
  virtual ~Talk() = default;
  // A failure to send shows in hear().
  virtual void say(Ctl kind, uint64_t tag, const Blob& body) = 0;
  virtual bool hear(Message* message, Deadline deadline) = 0;  // false with errno set
};

class RemoteTalk final : public Talk {
 public:
  RemoteTalk(SocketPtr socket, Stop& stop)
      : socket_(std::move(socket)), waiting_(stop, [s = socket_] { shutdown(s->fd(), SHUT_RDWR); }) {}
  void say(Ctl kind, uint64_t tag, const Blob& body) override {
    socket_->send_frame(kind, tag, body);
    socket_->drain(after_ms(5000));
  }
  bool hear(Message* m, Deadline deadline) override {
    if (!recv_all(socket_->fd(), &m->header, sizeof m->header, deadline)) return false;
    if (m->header.bytes > kMaxFrame) return errno = EPROTO, false;
    std::vector<char> body(m->header.bytes);
    if (!recv_all(socket_->fd(), body.data(), body.size(), deadline)) return false;
    m->body = Blob::of(std::move(body));
    return true;
  }

 private:
  SocketPtr socket_;
  Stop::During waiting_;
};

// For a rank in the root's own process.
class LocalSeat final : public Seat {
 public:
  void tell(Ctl kind, uint64_t tag, const Blob& body) override {
    std::lock_guard<std::mutex> lock(mutex_);
    told_.push_back({{kind, uint32_t(body.size), tag}, body});
    changed_.notify_all();
  }
  std::string address() const override { return "the root's process"; }
  bool hear(Message* message, Deadline deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    bool came = changed_.wait_until(lock, deadline, [&] { return !told_.empty() || ended_; });
    if (told_.empty()) return errno = came ? ECONNRESET : ETIMEDOUT, false;
    *message = std::move(told_.front());
    told_.pop_front();
    return true;
  }
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> told_;
  bool ended_ = false;
};

class LocalTalk final : public Talk {
 public:
  LocalTalk(Service& service, const Id& id, Stop& stop)
      : service_(service),
        id_(id),
        seat_(std::make_shared<LocalSeat>()),
        waiting_(stop, [seat = seat_] { seat->end(); }) {}
  ~LocalTalk() override {
    std::lock_guard<std::recursive_mutex> lock(service_.mutex);
    service_.roots.left(id_.token, seat_);
    service_.wake();
  }
  void say(Ctl kind, uint64_t tag, const Blob& body) override {
    std::lock_guard<std::recursive_mutex> lock(service_.mutex);
    if (!service_.roots.heard(id_.token, id_.serial, seat_, {kind, uint32_t(body.size), tag}, body))
      seat_->end();
    service_.wake();  // deadlines have changed
  }
  bool hear(Message* message, Deadline deadline) override { return seat_->hear(message, deadline); }

 private:
  Service& service_;
  Id id_;
  std::shared_ptr<LocalSeat> seat_;
  Stop::During waiting_;
};

class Joiner {
 public:
  Joiner(const std::vector<Id>& ids, const Announce& mine, const PeerInfo& info, Stop& stop)
      : ids_(ids), mine_(mine), info_(info), stop_(stop) {
    double seconds = mine.seconds;
    // Later than the root's time-out, which names the missing ranks.
    deadline_ = after_seconds(ids.size() > 1 ? 2 * seconds + 15 : seconds + 10);
  }

  ncclResult_t run(Table* table) {
    Shares shares{mine_.nranks, int(ids_.size())};
    bool sound = mine_.rank >= 0 && mine_.rank < mine_.nranks;
    size_t share = sound ? size_t(shares.of_rank(mine_.rank)) : 0;
    Message message;
    ncclResult_t r = meet(ids_[share], &message);
    // Other shares wait at the root of the first id.
    if (r != ncclSuccess && share != 0 && (messenger_ || !answered_))
      report(answered_ ? failure_ : Failure{r, last_error(), late_ranks()});
    if (r != ncclSuccess && ids_.size() > 1) let_own_roots_finish();
    if (r == ncclSuccess) table->bytes = message.body;
    return r;
  }

  // Tells the root of the first id a failure of which it does not know.
  void report(const Failure& failure) {
    const ErrorCode code = last_error_code();
    const LateRanks late = late_ranks();
    const std::string error = last_error();
    ncclResult_t ignored = ncclSuccess;
    if (std::unique_ptr<Talk> talk = open(ids_[0], &ignored))
      talk->say(Ctl::Failed, uint64_t(failure.result), failure.body());
    set_last_error(code, error, late);
  }

 private:
  std::unique_ptr<Talk> open(const Id& id, ncclResult_t* result) {
    Service* service = Service::get("a rendezvous");
    if (!service) return *result = ncclSystemError, nullptr;
    if (served_here(*service, id)) return std::make_unique<LocalTalk>(*service, id, stop_);
    Hello hello;
    hello.token = id.token;
    hello.serial = id.serial;
    hello.rank = mine_.rank;
    // The process that makes an id listens before. Only rank 0 of NCCL_COMM_ID may come late.
    Deadline connect_by = after_seconds(id.from_env() ? mine_.seconds : std::min(mine_.seconds, 5.0));
    std::string why, at = id.endpoint.address().str();
    SocketPtr socket;
    int error = 0;
    if (id.host == host_id() && !id.from_env()) {
      socket = dial(nullptr, &id.unix_name, hello, connect_by, Deadline::min(), stop_, &why);
      error = errno;
    }
    if (!socket && error != EACCES && !out_of_descriptors(error)) {
      // A maker that has exited does not come back.
      Deadline retry_until = id.from_env() ? connect_by : after_ms(1000);
      socket = dial(&id.endpoint, nullptr, hello, connect_by, retry_until, stop_, &why);
      error = errno;
    }
    if (socket) return std::make_unique<RemoteTalk>(std::move(socket), stop_);
    if (stop_.is_set())
      *result = fail_at(mine_.rank, mine_.nranks, ncclInternalError, "the rendezvous was aborted");
    else if (error == EACCES)
      *result = fail(ncclInvalidUsage, "rank %d cannot join the unique id at %s: %s", mine_.rank, at.c_str(),
                     why.c_str());
    else if (out_of_descriptors(error))
      *result = fail(ncclSystemError, "rank %d cannot join the unique id at %s: %s", mine_.rank, at.c_str(),
                     why.c_str());
    else
      *result = fail(id.from_env() ? ncclTimeout : ncclSystemError,
                     "rank %d cannot reach the root of the unique id at %s (%s): its maker has exited, or "
                     "another network interface is needed (NCCL_SOCKET_IFNAME)",
                     mine_.rank, at.c_str(), why.c_str());
    return nullptr;
  }

  bool served_here(Service& service, const Id& id) {
    if (!id.from_env() && id.unix_name != service.unix_name) return false;
    std::lock_guard<std::recursive_mutex> lock(service.mutex);
    return service.roots.serves(id.token, id.serial);
  }

  ncclResult_t cut_off(const Id& id) {
    if (stop_.is_set())
      return fail_at(mine_.rank, mine_.nranks, ncclInternalError, "the rendezvous was aborted");
    return fail_at(mine_.rank, mine_.nranks, errno == ETIMEDOUT ? ncclTimeout : ncclRemoteError,
                   "the root of the unique id at %s closed its connection during the rendezvous (%s)",
                   id.endpoint.address().str().c_str(), strerror(errno));
  }

  // Waits for a message of either kind.
  ncclResult_t expect(Talk& talk, const Id& id, Ctl kind, Ctl other, Message* message) {
    if (!talk.hear(message, deadline_)) return cut_off(id);
    if (message->header.kind == kind || message->header.kind == other) return ncclSuccess;
    answered_ = message->header.kind == Ctl::Failed;
    if (!answered_)
      return fail(ncclInternalError, "the root of the unique id sent an unexpected message (kind %u)",
                  unsigned(message->header.kind));
    messenger_ = message->header.tag >> 32;
    failure_ = Failure::of(message->header.tag, message->body);
    fail_at(mine_.rank, mine_.nranks, failure_.result, "%s", failure_.text.c_str());
    return blame(failure_.late);
  }

  ncclResult_t check_table(const Message& message) {
    if (message.body.size == size_t(mine_.nranks) * sizeof(PeerInfo)) return ncclSuccess;
    return fail(ncclInternalError, "the root's table has %zu bytes", message.body.size);
  }

  ncclResult_t meet(const Id& id, Message* message) {
    ncclResult_t r = ncclSuccess;
    std::unique_ptr<Talk> talk = open(id, &r);
    if (!talk) return r;
    talk->say(Ctl::Announce, 0, Blob::copy(&mine_, sizeof mine_));
    if ((r = expect(*talk, id, Ctl::Gathered, Ctl::Gathered, message)) != ncclSuccess) return r;
    talk->say(Ctl::Introduce, 0, Blob::copy(&info_, sizeof info_));
    if ((r = expect(*talk, id, Ctl::Table, Ctl::Share, message)) != ncclSuccess) return r;
    if (message->header.kind == Ctl::Table) return check_table(*message);
    r = bring(message->body, message);
    if (r == ncclSuccess)
      talk->say(Ctl::Table, 0, message->body);
    else
      talk->say(Ctl::Failed, uint64_t(r), failure_.body());
    return r;
  }

  // The first rank of a share sends it to the root of the first id.
  ncclResult_t bring(const Blob& share, Message* message) {
    answered_ = false;
    ncclResult_t r = ncclSuccess;
    Announce head = mine_;
    head.share = Shares{mine_.nranks, int(ids_.size())}.of_rank(mine_.rank);
    if (std::unique_ptr<Talk> talk = open(ids_[0], &r)) {
      talk->say(Ctl::Announce, 0, Blob::copy(&head, sizeof head));
      talk->say(Ctl::Share, 0, share);
      r = expect(*talk, ids_[0], Ctl::Table, Ctl::Table, message);
    }
    if (r == ncclSuccess) r = check_table(*message);
    if (r != ncclSuccess && !answered_) failure_ = {r, last_error(), late_ranks()};
    return r;
  }

  // Waits until the roots of this process have answered their ranks: the caller may exit after this.
  void let_own_roots_finish() {
    Service* service = Service::get("a rendezvous");
    for (Deadline until = after_ms(1000); service && Clock::now() < until; usleep(5000)) {
      std::lock_guard<std::recursive_mutex> lock(service->mutex);
      if (!service->roots.busy()) return;
    }
  }

  const std::vector<Id>& ids_;
  const Announce mine_;
  const PeerInfo info_;
  Stop& stop_;
  Deadline deadline_;
  bool answered_ = false, messenger_ = false;  // the root has sent the reason; this rank must tell others
  Failure failure_{ncclSuccess, {}, {}};
};

}  // namespace

ncclResult_t join(const std::vector<Id>& ids, const Announce& mine, const PeerInfo& info, Stop& stop,
                  Table* table) {
  return Joiner(ids, mine, info, stop).run(table);
}

void end_id(const Id& id, const Announce& mine, const Failure& why, Stop& stop) {
  Joiner({id}, mine, {}, stop).report(why);
}

}  // namespace pncpu
