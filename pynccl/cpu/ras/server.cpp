#include "ras/server.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <optional>

#include "base/threads.hpp"
#include "ras/client.hpp"
#include "ras/collection.hpp"

namespace pncpu {
namespace {

constexpr char kAddress[] = "localhost:28028";
constexpr size_t kMostClients = 32;
// When there are too many clients: how long one may go without a valid command, and with one.
constexpr auto kGrace = std::chrono::milliseconds(20), kLongGrace = std::chrono::milliseconds(1000);
constexpr std::chrono::milliseconds kAnotherTry{1000};    // at an address that another process has
constexpr std::chrono::milliseconds kAnotherLook{30000};  // at a name that has no address
constexpr auto kBetween = std::chrono::milliseconds(50);  // two collections: strangers may ask all the time
constexpr auto kPause = std::chrono::milliseconds(100);   // without a descriptor

class Server {
 public:
  Server(Service& service, std::string where) : service_(service), where_(std::move(where)) {}
  void start();

 private:
  void run();
  void rest();
  void listen(Deadline now);
  void accept(Deadline now);
  bool make_room(Deadline now);
  void collect(Deadline now);
  void answer(Deadline now);
  Deadline next(Deadline now);
  void wait(Deadline until);
  bool accepts(Deadline now) const { return listener_ && now >= paused_until_; }

  Service& service_;
  const std::string where_;
  Fd wake_, listener_;
  bool told_ = false;
  std::atomic<bool> has_ranks_{true};
  Deadline try_at_{}, paused_until_{}, collect_at_{};
  std::list<RasClient> clients_;
  std::list<RasClient*> asked_;  // whom the running collection answers
  std::optional<Collection> collection_;
};

void Server::start() {
  wake_ = Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!wake_) return log(Level::Warn, "RAS has no server here: %s", describe_error(errno).c_str());
  start_thread("the RAS server", [this] { run(); });
  std::lock_guard<std::recursive_mutex> lock(service_.mutex);
  service_.ranks_changed = [this] {
    has_ranks_.store(!service_.locals.empty());
    uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof one) < 0) return;  // the count is full: the thread is awake
  };
}

void Server::run() {
  name_this_thread("pynccl-ras");
  for (;;) try {
      Deadline now = Clock::now();
      if (!has_ranks_.load()) rest();
      if (has_ranks_.load() && !listener_ && now >= try_at_) listen(now);
      collect(now);
      answer(now);
      clients_.remove_if([](const RasClient& c) { return c.stage() == RasClient::Stage::Gone; });
      wait(next(now));
    } catch (const std::exception& e) {
      log(Level::Warn, "the RAS server drops its clients: %s", e.what());
      rest();
      try_at_ = Clock::now() + kAnotherTry;
    }
}

// Without ranks there is nothing to say, and another process may serve.
void Server::rest() {
  collection_.reset();
  asked_.clear();
  clients_.clear();
  listener_.reset();
}

void Server::listen(Deadline now) {
  std::string why;
  Address at;
  bool readable = Address::parse(where_.c_str(), &at, &why);
  try_at_ = now + (readable ? kAnotherTry : kAnotherLook);
  if (readable) listener_ = listen_on(&at, &why);
  bool taken = readable && !listener_ && errno == EADDRINUSE;
  if (listener_ && fcntl(listener_.get(), F_SETFL, O_NONBLOCK) != 0) listener_.reset();
  if (listener_) return log(Level::Info, "RAS client listening socket at %s", at.str().c_str());
  if (!told_)
    log(taken ? Level::Info : Level::Warn, "RAS does not listen at NCCL_RAS_ADDR %s: %s", where_.c_str(),
        why.c_str());
  told_ = true;
}

// ---- clients ----

void Server::accept(Deadline now) {
  for (int i = 0; i < 16 && make_room(now); ++i) {
    Fd fd =
        Fd::made_by([&] { return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (!fd) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) paused_until_ = now + kPause;
      return;
    }
    clients_.emplace_back(std::move(fd), now);
    clients_.back().proceed(POLLIN, now);  // most send their orders immediately
  }
}

// The oldest client that has not asked for anything makes room for a new one.
bool Server::make_room(Deadline now) {
  if (clients_.size() < kMostClients) return true;
  auto idle = std::find_if(clients_.begin(), clients_.end(), [&](const RasClient& c) {
    return c.stage() == RasClient::Stage::Orders && c.began() + (c.speaks() ? kLongGrace : kGrace) <= now;
  });
  if (idle != clients_.end()) return clients_.erase(idle), true;
  paused_until_ = now + kGrace;
  return false;
}

// ---- answers ----

// All clients that wait when a collection begins take part in it.
void Server::collect(Deadline now) {
  if (collection_ || now < collect_at_) return;
  for (RasClient& c : clients_) {
    if (c.stage() != RasClient::Stage::Waits) continue;
    asked_.push_back(&c);
    c.wait_until(now + c.patience());
  }
  if (!asked_.empty()) collection_.emplace(service_, now);
}

void Server::answer(Deadline now) {
  if (!collection_) return;
  asked_.remove_if([](RasClient* c) { return c->stage() != RasClient::Stage::Waits; });
  collection_->tick(now);
  collection_->job.seconds = std::chrono::duration<double>(now - collection_->began).count();
  std::shared_ptr<const std::string> texts[3];
  asked_.remove_if([&](RasClient* c) {
    if (!collection_->done() && c->deadline() > now) return false;
    auto& text = texts[c->wants_json() ? 0 : 1 + c->wants_all()];
    const RasJob& job = collection_->job;
    if (!text)
      text = std::make_shared<const std::string>(c->wants_json() ? job.json() : job.text(c->wants_all()));
    c->answer(text, now);
    return true;
  });
  if (!asked_.empty()) return;
  collection_.reset();
  collect_at_ = now + kBetween;
}

// ---- waiting ----

Deadline Server::next(Deadline now) {
  Deadline next = collection_ ? collection_->next(now) : kForever;
  if (!listener_ && has_ranks_.load()) next = std::min(next, try_at_);
  if (listener_ && !accepts(now)) next = std::min(next, paused_until_);
  for (const RasClient& c : clients_) {
    bool waits = c.stage() == RasClient::Stage::Waits;
    if (!waits || collection_)
      next = std::min(next, c.deadline());
    else
      next = std::min(next, collect_at_);
  }
  return next;
}

void Server::wait(Deadline until) {
  Deadline now = Clock::now();
  std::vector<pollfd> entries{{wake_.get(), POLLIN, 0}, {accepts(now) ? listener_.get() : -1, POLLIN, 0}};
  for (const RasClient& c : clients_) entries.push_back({c.fd(), c.events(), 0});
  const size_t questions = entries.size();
  if (collection_) collection_->poll_for(&entries);
  int64_t ms = until == kForever
                   ? -1
                   : std::clamp<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(until - now).count(), 0,
                                         3600 * 1000);
  poll(entries.data(), entries.size(), int(ms));
  now = Clock::now();
  uint64_t count;
  if ((entries[0].revents & POLLIN) && read(wake_.get(), &count, sizeof count) < 0) return;
  size_t at = 2;
  for (RasClient& c : clients_) c.proceed(entries[at++].revents, now);
  for (at = questions; at < entries.size(); ++at) collection_->proceed(entries[at]);
  if (entries[1].revents & POLLIN) accept(now);
}

struct Servers {
  std::once_flag once;
};

}  // namespace

void serve_ras() {
  const char* where = param_str("NCCL_RAS_ADDR");
  bool wanted = param_is_set("NCCL_RAS_ENABLE") ? param_int("NCCL_RAS_ENABLE") != 0 : where != nullptr;
  if (!wanted) return;
  Service* service = Service::get("RAS");
  if (!service) return;
  std::call_once(per_process<Servers>().once, [&] {
    try {
      // Never deleted: its thread may run.
      (new Server(*service, where ? where : kAddress))->start();
    } catch (const std::exception& e) {
      log(Level::Warn, "RAS has no server here: %s", e.what());
    }
  });
}

}  // namespace pncpu
