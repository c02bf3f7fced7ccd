#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <system_error>
#include <thread>

#include "base/fork.hpp"
#include "base/threads.hpp"
#include "service/process.hpp"
#include "service/state.hpp"

namespace pncpu {
namespace {

constexpr int kAtOnce = 16;  // connections accepted before other events are handled
constexpr size_t kPostsAtOnce = 1024;
constexpr size_t kPiece = 64 << 10;  // the buffer of a body grows as it arrives
constexpr auto kLinger = std::chrono::seconds(10);

// If the launcher says that all ranks run on this machine, other machines need not reach the listener.
bool all_ranks_are_local() {
  int64_t world = param_int("WORLD_SIZE");
  return world > 0 && param_str("LOCAL_WORLD_SIZE") && world == param_int("LOCAL_WORLD_SIZE") &&
         !param_str("NCCL_SOCKET_IFNAME") && !param_str("NCCL_COMM_ID");
}

bool pick_address(Address* address) {
  if (!all_ranks_are_local()) return pick_interface(address) == ncclSuccess;
  const char* family = param_str("NCCL_SOCKET_FAMILY");
  return Address::parse(family && strcasecmp(family, "AF_INET6") == 0 ? "[::1]:1" : "127.0.0.1:1", address,
                        nullptr) &&
         (address->set_port(0), true);
}

// A rank that joins over a connection.
class RemoteSeat final : public Seat {
 public:
  RemoteSeat(Service& service, SocketPtr socket, std::string address)
      : service_(service), socket_(std::move(socket)), address_(std::move(address)) {}
  void tell(Ctl kind, uint64_t tag, const Blob& body) override { socket_->send_frame(kind, tag, body); }
  void close() override { service_.finish(socket_); }
  std::string address() const override { return address_; }

 private:
  Service& service_;
  SocketPtr socket_;
  std::string address_;
};

thread_local bool is_service = false;

struct Holder {
  std::mutex mutex;  // of its creation
  std::atomic<Service*> service{nullptr};
};

}  // namespace

Service* Service::get(const char* needed_by) {
  Holder& holder = per_process<Holder>();
  // No lock if it exists: the service's own thread calls this under its mutex.
  if (Service* service = holder.service.load()) return service;
  std::lock_guard<std::mutex> lock(holder.mutex);
  if (Service* service = holder.service.load()) return service;
  std::string why;
  auto fresh = std::make_unique<Service>();
  if (!fresh->start(&why))
    return fail(ncclSystemError, "%s cannot start the bootstrap service: %s", needed_by, why.c_str()),
           nullptr;
  holder.service.store(fresh.get());
  return fresh.release();
}

bool Service::start(std::string* why) {
  auto failed = [&](const char* what) { return *why = what + (": " + describe_error(errno)), false; };
  epoll_ = Fd::made_by([] { return epoll_create1(EPOLL_CLOEXEC); });
  wake_ = Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!epoll_ || !wake_) return failed("epoll");
  Address address;
  if (!pick_address(&address)) return *why = last_error(), false;
  if (!listen(address, why)) return false;
  unix_name = Token::random();
  process = Token::random();
  Fd local = listen_unix(unix_name);
  if (!local) return failed("cannot open a Unix socket");
  epoll_event event{EPOLLIN, {.fd = local.get()}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, local.get(), &event) != 0) return failed("epoll_ctl");
  listeners_.push_back({std::move(local), &local_, ""});
  event = {EPOLLIN, {.fd = wake_.get()}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) return failed("epoll_ctl");
  hold_spare();
  try {
    std::thread([this] { run(); }).detach();
  } catch (const std::system_error& e) {
    *why = "no thread can be started: " + e.code().message() + " (" + kThreadLimits + ")";
    return false;
  }
  return true;
}

bool Service::listen(Address at, std::string* why) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  std::string asked = at.str();
  for (Listener& l : listeners_)
    if (l.asked == asked) return true;
  Fd fd = listen_on(&at, why);
  if (!fd) return false;
  epoll_event event{network_.resting ? 0u : uint32_t(EPOLLIN), {.fd = fd.get()}};
  if (fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0 ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0)
    return *why = describe_error(errno), false;
  if (listeners_.empty()) endpoint = Endpoint::of(at);
  listeners_.push_back({std::move(fd), &network_, asked});
  return true;
}

ncclResult_t Service::read_secret() {
  std::string now;
  if (ncclResult_t r = pncpu::read_secret(&now); r != ncclSuccess) return r;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  secret = std::move(now);
  return ncclSuccess;
}

void Service::wake() {
  uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof one) < 0) return;  // the count is full: the thread is awake
}

// ---- the loop ----

void Service::run() {
  name_this_thread("pynccl-service");
  is_service = true;
  epoll_event events[64];
  for (;;) {
    Deadline next;
    {
      std::lock_guard<std::recursive_mutex> lock(mutex);
      Deadline now = Clock::now();
      tidy(now);
      next = std::min(
          {network_.admission.next_change(now), local_.admission.next_change(now), roots.next_deadline()});
      if (!leaving_.empty()) next = std::min(next, leaving_.begin()->first);
    }
    int64_t ms = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    int n = epoll_wait(epoll_.get(), events, 64,
                       int(next == kForever ? -1 : std::clamp<int64_t>(ms, 0, 3600 * 1000)));
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (int i = 0; i < n; ++i) {
      int fd = events[i].data.fd;
      try {
        Gate* gate = nullptr;
        for (Listener& l : listeners_)
          if (l.fd.get() == fd) gate = l.gate;
        if (gate)
          accept_from(fd, *gate);
        else if (fd == wake_.get())
          deliver();
        else
          attend(fd, events[i].events);
      } catch (const std::exception& e) {
        log(Level::Warn, "the bootstrap service: %s", e.what());
      }
    }
  }
}

void Service::tidy(Deadline now) {
  try {
    roots.expire(now);
    if (starved() && roots.busy()) {
      turn_ranks_away();
    } else if (lends_spare_ && starved_since() == kForever) {
      hold_spare();
      lends_spare_ = !spare;
    }
  } catch (const std::exception& e) {
    log(Level::Warn, "the bootstrap service: %s", e.what());
  }
  while (!leaving_.empty() && leaving_.begin()->first <= now) end(leaving_.begin()->second);
  std::vector<SocketPtr> finished = std::move(finished_);
  finished_.clear();
  for (const SocketPtr& socket : finished) drop(socket);
  tend(network_, now);
  tend(local_, now);
}

void Service::turn_ranks_away() {
  if (another_descriptor()) return;  // some have become free
  roots.shut(describe_error(errno));
  // By this descriptor the waiting ranks are accepted one after the other, and told the reason.
  spare.reset();
  lends_spare_ = true;
}

// Ends overdue connections; pauses or resumes the listeners.
void Service::tend(Gate& gate, Deadline now) {
  for (int fd; (fd = gate.admission.overdue(now)) >= 0;) {
    gate.admission.went(fd, now);
    end(fd);
  }
  bool rest = !gate.admission.accepts(now);
  if (rest == gate.resting) return;
  gate.resting = rest;
  for (Listener& l : listeners_) {
    if (l.gate != &gate) continue;
    epoll_event event{rest ? 0u : uint32_t(EPOLLIN), {.fd = l.fd.get()}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, l.fd.get(), &event);
  }
}

void Service::accept_from(int listener, Gate& gate) {
  for (int i = 0; i < kAtOnce && gate.admission.accepts(Clock::now()); ++i) {
    Address from;
    from.len = sizeof from.ss;
    Fd fd = Fd::made_by(
        [&] { return accept4(listener, reinterpret_cast<sockaddr*>(&from.ss), &from.len, SOCK_CLOEXEC); });
    if (!fd) {
      bool no_room = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (no_room) gate.admission.starved(Clock::now());
      if (errno == EINTR || errno == ECONNABORTED) continue;
      break;
    }
    int number = fd.get();
    if (!admit(std::move(fd), gate.admission, &gate == &local_ ? nullptr : &from)) continue;
    // A peer that sends its hello immediately is authenticated here.
    attend(number, EPOLLIN);
    tend(gate, Clock::now());
  }
}

// `from` is the peer's network address; nullptr for the Unix socket.
bool Service::admit(Fd owned, Admission& admission, const Address* from) {
  int fd = owned.get();
  Admission::Source source;
  if (from) {
    source = Admission::Source::of(*from);
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  } else {
    ucred who{};
    socklen_t size = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return false;
    source = Admission::Source::of_user(who.uid);
    // Refuse other users. Root can read this process's memory anyway.
    if (who.uid != geteuid() && who.uid != 0) {
      admission.came(fd, source, Clock::now());
      admission.went(fd, Clock::now());
      return false;
    }
  }
  auto socket = std::make_shared<Socket>(std::move(owned));
  auto connection = std::make_unique<Connection>();
  connection->guest_of = &admission;
  connection->local = !from;
  connection->address = from ? from->str() : "this host";
  watch(socket, std::move(connection), EPOLLIN);
  admission.came(fd, source, Clock::now());
  return true;
}

void Service::watch(const SocketPtr& socket, std::unique_ptr<Connection> connection, uint32_t events) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  connection->socket = socket;
  connections_[socket->fd()] = std::move(connection);
  try {
    socket->watch(epoll_.get(), events);
  } catch (...) {
    connections_.erase(socket->fd());
    throw;
  }
}

void Service::drop(const SocketPtr& socket) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = connections_.find(socket->fd());
  if (it != connections_.end() && it->second->socket == socket) end(socket->fd());
}

void Service::release(const SocketPtr& socket) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = connections_.find(socket->fd());
  if (it != connections_.end() && it->second->socket == socket) take(socket->fd());
}

void Service::finish(const SocketPtr& socket) {
  auto it = connections_.find(socket->fd());
  if (it == connections_.end() || it->second->socket != socket) return;
  it->second->stage = Connection::Leaves;
  if (!socket->flush() || socket->all_sent()) return finished_.push_back(socket);
  it->second->leaves_by = Clock::now() + kLinger;
  leaving_.insert({it->second->leaves_by, socket->fd()});
}

std::unique_ptr<Connection> Service::take(int fd) {
  auto it = connections_.find(fd);
  if (it == connections_.end()) return nullptr;
  std::unique_ptr<Connection> c = std::move(it->second);
  connections_.erase(it);
  c->socket->unwatch();
  if (c->guest_of) c->guest_of->went(fd, Clock::now());
  if (c->leaves_by != kForever) leaving_.erase({c->leaves_by, fd});
  return c;
}

// Removes the connection and notifies its sink or root.
void Service::end(int fd) {
  std::unique_ptr<Connection> c = take(fd);
  if (!c) return;
  if (c->stage == Connection::Calls) end_call({c->process, c->local});
  if (c->stage == Connection::Lines) end_line(*c);
  if (c->stage == Connection::Joins) roots.left(c->hello.token, c->seat);
}

void Service::attend(int fd, uint32_t events) {
  try {
    serve(fd, events);
  } catch (const std::exception& e) {
    // Out of memory: drop only this connection.
    log(Level::Warn, "the bootstrap service drops a connection: %s", e.what());
    end(fd);
  }
}

void Service::serve(int fd, uint32_t events) {
  auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  Connection& c = *it->second;
  if (c.stage == Connection::Data) return c.sink->data_ready();
  SocketPtr keep = c.socket;
  bool stays = true;
  if (events & EPOLLOUT) {
    stays = keep->flush();
    if (c.stage == Connection::Leaves && keep->all_sent()) stays = false;
    if (c.line) tell_room(*c.line);
  }
  if (stays && (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP))) stays = read(c);
  if (!stays) drop(keep);
}

// Reads up to `size` bytes of `into` in total; false: the connection has ended.
bool Service::fill(Connection& c, void* into, size_t size) {
  while (c.got < size) {
    ssize_t n = recv(c.socket->fd(), static_cast<char*>(into) + c.got, size - c.got, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (n <= 0) return false;
    c.got += size_t(n);
  }
  return true;
}

// False ends the connection. c is destroyed if the connection was passed to a sink.
bool Service::read(Connection& c) {
  char byte;
  switch (c.stage) {
    case Connection::Greets:
      if (!fill(c, &c.hello, sizeof c.hello)) return false;
      if (c.got >= sizeof c.hello.magic && c.hello.magic != Hello::kMagic) return false;
      return c.got < sizeof c.hello || greeted(c);
    case Connection::Proves:
      if (!fill(c, c.answer.data(), c.answer.size()))
        return unproved(c, "left without proving that it has the root's secret"), false;
      return c.got < c.answer.size() || proved(c);
    case Connection::Calls:
      if (!fill(c, &c.head, sizeof c.head)) return false;
      if (c.got < sizeof c.head) return true;
      c.got = 0;
      if (c.head.frame.kind != Ctl::Line) return false;
      open_line(c, true);
      end_call({c.process, c.local});
      return read_frames(c);
    case Connection::Joins:
    case Connection::Lines:
    case Connection::Notes:
      return read_frames(c);
    default:
      return recv(c.socket->fd(), &byte, 1, MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR);
  }
}

// ---- authentication ----

bool Service::greeted(Connection& c) {
  c.got = 0;
  bool joins = c.hello.kind == HelloKind::Join;
  bool asks = c.hello.kind == HelloKind::Ask;
  bool is_known = joins  ? roots.serves(c.hello.token, c.hello.serial)
                  : asks ? c.hello.token == process
                         : locals.count(c.hello.token) != 0;
  if (!is_known) return false;
  bool has_one = c.hello.secured != 0;
  if (secret.empty() && !has_one) return known(c);
  Challenge challenge;
  challenge.secured = !secret.empty();
  if (has_one && challenge.secured) {
    c.nonce = challenge.nonce = Token::random();
    challenge.proof = proof(secret, Role::Listens, c.hello, c.nonce);
  }
  if (has_one) {
    if (!send_all(c.socket->fd(), &challenge, sizeof challenge, Clock::now())) return false;
    if (!challenge.secured) return unproved(c, "has a secret (PYNCCL_SECRET), and the root has none"), false;
    c.stage = Connection::Proves;
    return true;
  }
  if (joins) {
    constexpr char kText[] = "the root has a secret (PYNCCL_SECRET), and this rank has none";
    c.socket->send_frame(Ctl::Failed, ncclInvalidUsage, Blob::copy(kText, sizeof kText - 1));
    unproved(c, "has no secret (PYNCCL_SECRET), and the root has one");
  }
  return false;
}

bool Service::proved(Connection& c) {
  Digest expected = proof(secret, Role::Connects, c.hello, c.nonce);
  c.got = 0;
  if (equal_in_constant_time(expected.data(), c.answer.data(), expected.size())) return known(c);
  return unproved(c, "has another secret (PYNCCL_SECRET) than the root"), false;
}

void Service::unproved(const Connection& c, const std::string& what) {
  std::string text = "rank " + std::to_string(c.hello.rank) + " (at " + c.address + ") " + what;
  if (Deadline now = Clock::now(); now - last_told_ > std::chrono::seconds(1)) {
    last_told_ = now;
    log(Level::Warn, "%s", text.c_str());
  }
  if (c.hello.kind == HelloKind::Join) roots.unproved(c.hello.token, c.hello.serial, text);
}

void Service::is_no_stranger(Connection& c) {
  if (c.guest_of) c.guest_of->proved(c.socket->fd());
  c.guest_of = nullptr;
}

bool Service::known(Connection& c) {
  bool stranger = c.hello.kind == HelloKind::Join && roots.open_to_all(c.hello.token);
  if (!stranger) is_no_stranger(c);
  if (c.hello.kind == HelloKind::Join) {
    c.seat = std::make_shared<RemoteSeat>(*this, c.socket, c.address);
    c.stage = Connection::Joins;
    return read_frames(c);
  }
  if (c.hello.kind == HelloKind::Line || c.hello.kind == HelloKind::Note) {
    c.process = c.hello.process;
    if (c.hello.kind == HelloKind::Line) return accept_line(c) && read_frames(c);
    c.stage = Connection::Notes;
    c.leaves_by = Clock::now() + kLinger;
    leaving_.insert({c.leaves_by, c.socket->fd()});
    return read_frames(c);
  }
  if (c.hello.kind == HelloKind::Ask) {
    SocketPtr keep = c.socket;
    keep->send_frame(Ctl::State, 0, Blob::of(describe()));
    finish(keep);
    return true;
  }
  SinkPtr sink = locals.at(c.hello.token).sink;
  SocketPtr socket = c.socket;
  Hello hello = c.hello;
  drop(socket);  // c is gone
  sink->arrived(hello, std::move(socket));
  return true;
}

bool Service::read_frames(Connection& c) {
  SocketPtr keep = c.socket;
  const bool joins = c.stage == Connection::Joins;
  const size_t head = joins ? sizeof c.head.frame : sizeof c.head;
  for (;;) {
    if (c.got < head) {
      if (!fill(c, &c.head, head)) return false;
      if (c.got < head) return true;
      uint32_t most = joins ? RootTable::most_bytes(c.head.frame.kind) : kMaxFrame;
      if (c.head.frame.bytes > most || (c.guest_of && c.head.frame.kind != Ctl::Announce)) return false;
      c.body.clear();
    }
    size_t missing = 0;
    if (!read_body(c, &missing)) return false;
    if (missing) return true;
    c.got = 0;
    Blob body = Blob::of(std::move(c.body));
    if (joins) {
      is_no_stranger(c);
      if (!roots.heard(c.hello.token, c.hello.serial, c.seat, c.head.frame, body)) return false;
      if (c.stage != Connection::Joins) return true;
      continue;
    }
    if (!take_from_line(c, body)) return false;
    auto it = connections_.find(keep->fd());
    if (it == connections_.end() || it->second->socket != keep) return true;
  }
}

// The buffer grows as the body arrives, whatever length the header claims.
bool Service::read_body(Connection& c, size_t* missing) {
  while ((*missing = c.head.frame.bytes - c.body.size())) {
    size_t have = c.body.size(), piece = std::min(*missing, std::max(kPiece, have));
    c.body.resize(have + piece);
    ssize_t n = recv(c.socket->fd(), c.body.data() + have, piece, MSG_DONTWAIT);
    c.body.resize(have + size_t(std::max<ssize_t>(n, 0)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (n <= 0) return false;
  }
  return true;
}

// ---- ranks of this process ----

void Service::post(Posts posts) noexcept {
  std::lock_guard<std::mutex> lock(posts_mutex_);
  bool first = posts_.empty() && !posts.empty();
  posts_.splice(posts_.end(), posts);
  if (first) wake();
}

void Service::deliver() {
  uint64_t count;
  if (::read(wake_.get(), &count, sizeof count) < 0) return;
  Posts posts;
  {
    std::lock_guard<std::mutex> lock(posts_mutex_);
    posts.swap(posts_);
  }
  for (size_t given = 0; !posts.empty();) {
    Posts first;
    first.splice(first.end(), posts, posts.begin());
    try {
      give(first);
    } catch (const std::exception& e) {
      log(Level::Warn, "the bootstrap service lost a message between two ranks of this process: %s",
          e.what());
    }
    if (++given % kPostsAtOnce) continue;
    mutex.unlock();  // let others have their turn
    mutex.lock();
  }
}

void Service::give(Posts& post) {
  const Post& p = post.front();
  auto it = locals.find(p.to);
  if (it == locals.end()) return;
  SinkPtr sink = it->second.sink;
  if (it->second.attached) {
    if (is_sound(it->second, p)) give_to(*sink, p);
    return;
  }
  it->second.kept.splice(it->second.kept.end(), post);
  if (sink) sink->news();
}

void Service::give_to(Sink& sink, const Post& p) {
  if (p.header.kind == Ctl::Closed)
    sink.closed(p.from);
  else
    sink.frame(p.from, p.header, p.body);
}

bool Service::is_sound(const Local& local, const Post& p) const {
  if (p.origin == Token()) return true;
  return p.from >= 0 && p.from < local.table.size() && local.table[p.from].process == p.origin;
}

Fd Service::another_descriptor() const {
  return Fd::made_by([this] { return fcntl(wake_.get(), F_DUPFD_CLOEXEC, 0); });
}

void Service::hold_spare() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  spare = another_descriptor();
}

std::vector<char> Service::describe() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Speaker speaker;
  speaker.process = process;
  speaker.pid = getpid();
  snprintf(speaker.host_name, sizeof speaker.host_name, "%s", host_name().c_str());
  std::vector<char> said;
  append(&said, speaker);
  for (auto& [token, local] : locals) {
    size_t before = said.size();
    if (local.sink) local.sink->describe(&said);
    if (said.size() <= kMaxFrame) continue;
    said.resize(before);
    log(Level::Warn, "RAS leaves out communicators of this process: they do not fit into %u bytes",
        kMaxFrame);
    break;
  }
  return said;
}

Deadline Service::starved_since() const {
  return std::min(network_.admission.starved_since(), local_.admission.starved_since());
}

bool Service::starved() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Deadline since = starved_since();
  return since != kForever && Clock::now() - since > std::chrono::seconds(1);
}

// ---- the interface for the rest of the library ----

bool starved() {
  Service* s = Service::get("a communicator");
  return s && s->starved();
}

bool in_service() { return is_service; }

ncclResult_t describe_self(PeerInfo* info) {
  Service* s = Service::get("a communicator");
  if (!s) return ncclSystemError;
  if (ncclResult_t r = s->read_secret(); r != ncclSuccess) return r;
  info->token = Token::random();
  info->process = s->process;
  info->unix_name = s->unix_name;
  info->host = host_id();
  info->pid = getpid();
  info->endpoint = s->endpoint;
  snprintf(info->host_name, sizeof info->host_name, "%s", host_name().c_str());
  return ncclSuccess;
}

ncclResult_t make_id(Id* id, bool from_env) {
  if (const char* text = from_env ? param_str("NCCL_COMM_ID") : nullptr) {
    std::string why;
    Address address;
    if (!Address::parse(text, &address, &why))
      return fail(ncclInvalidArgument, "NCCL_COMM_ID=%s: %s", text, why.c_str());
    id->token = Token::of(text);
    id->endpoint = Endpoint::of(address);
    return ncclSuccess;
  }
  Service* s = Service::get("ncclGetUniqueId");
  if (!s) return ncclSystemError;
  if (ncclResult_t r = s->read_secret(); r != ncclSuccess) return r;
  id->host = host_id();
  id->unix_name = s->unix_name;
  id->endpoint = s->endpoint;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  s->roots.ids.make(id);
  return ncclSuccess;
}

ncclResult_t open_env_root(const Id& id) {
  std::string why, at = id.endpoint.address().str();
  Service* s = Service::get("NCCL_COMM_ID");
  if (!s) return ncclSystemError;
  if (ncclResult_t r = s->read_secret(); r != ncclSuccess) return r;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  if (!s->listen(id.endpoint.address(), &why))
    return fail(ncclSystemError, "rank 0 cannot listen on NCCL_COMM_ID %s: %s", at.c_str(), why.c_str());
  s->roots.open_public(id.token, s->secret.empty());
  static std::atomic<bool> told{false};
  if (s->secret.empty() && !told.exchange(true))
    log(Level::Warn,
        "NCCL_COMM_ID %s is public: any process that reaches it can take the place of a rank. "
        "PYNCCL_SECRET or PYNCCL_SECRET_FILE, set on every rank, admits only processes that have the secret.",
        at.c_str());
  return ncclSuccess;
}

void expect(const Token& token, SinkPtr sink) {
  if (Service* s = Service::get("a communicator")) {
    std::lock_guard<std::recursive_mutex> lock(s->mutex);
    s->locals[token].sink = std::move(sink);
    if (s->ranks_changed) s->ranks_changed();
  }
}

void attach(const Token& token) {
  Service* s = Service::get("a communicator");
  if (!s) return;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  auto it = s->locals.find(token);
  if (it == s->locals.end()) return;
  it->second.attached = true;
  Posts kept = std::move(it->second.kept);
  SinkPtr sink = it->second.sink;
  const Service::Local local{nullptr, true, it->second.table, {}, {}};
  for (const Post& p : kept)
    if (s->is_sound(local, p)) Service::give_to(*sink, p);
}

bool has_bad_news(const Token& token) {
  Service* s = Service::get("a communicator");
  if (!s) return false;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  auto it = s->locals.find(token);
  if (it == s->locals.end()) return false;
  return std::any_of(it->second.kept.begin(), it->second.kept.end(), [&](const Post& p) {
    return (p.header.kind == Ctl::Error || p.header.kind == Ctl::Closed) && s->is_sound(it->second, p);
  });
}

void forget(const Token& token) {
  Service* s = Service::get("a communicator");
  if (!s) return;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  auto it = s->locals.find(token);
  if (it == s->locals.end()) return;
  Service::Local gone = std::move(it->second);
  s->locals.erase(it);
  s->post(std::move(gone.end_notices));
  s->leave_lines(token);
  if (s->ranks_changed) s->ranks_changed();
}

bool lives_here(const Token& token) {
  Service* s = Service::get("a communicator");
  if (!s) return false;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  return s->locals.count(token) != 0;
}

bool link(const Token& to, int to_rank, const Token& mine) {
  Service* s = Service::get("a communicator");
  if (!s) return false;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  auto it = s->locals.find(to);
  if (it == s->locals.end()) return false;
  it->second.end_notices.push_back({mine, to_rank, {Ctl::Closed, 0, 0}, {}});
  return true;
}

void post(Posts posts) {
  if (Service* s = Service::get("a communicator")) s->post(std::move(posts));
}

void post(const Token& to, int from, Ctl kind, uint64_t tag, const Blob& body) {
  post({{to, from, {kind, uint32_t(body.size), tag}, body}});
}

void hang_up(const Token& to, int from) { post(to, from, Ctl::Closed, 0, {}); }

void watch_data(SocketPtr epoll, SinkPtr sink) {
  auto connection = std::make_unique<Connection>();
  connection->stage = Connection::Data;
  connection->sink = std::move(sink);
  if (Service* s = Service::get("a communicator"))
    s->watch(epoll, std::move(connection), EPOLLIN | EPOLLONESHOT);
}

void unwatch(const SocketPtr& socket) {
  if (!socket) return;
  if (Service* s = Service::get("a communicator")) s->release(socket);
}

}  // namespace pncpu
