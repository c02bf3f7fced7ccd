#include "service/service.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/un.h>

#include <set>
#include <thread>

#include "service/root.hpp"

namespace pncpu {
namespace {

std::mutex g_sockets_mutex;
std::set<int>& open_sockets() {
  static auto* fds = new std::set<int>;
  return *fds;
}
std::atomic<uint32_t> g_generation{0};

struct Connection {
  enum Stage { AwaitHello, AwaitJoin, Joined, Control, Data };
  SocketPtr socket;
  Stage stage = AwaitHello;
  Hello hello;
  Join join;
  size_t got = 0;  // bytes of the hello, join or frame header
  CtlHeader header;
  std::vector<char> body;
  int rank = -1;
  SinkPtr sink;
  Deadline deadline = kForever;
};

class Service {
 public:
  bool start(std::string* why);
  void describe(PeerInfo* info);
  bool add_listener(Address address, std::string* why);
  void add(const SocketPtr& socket, std::unique_ptr<Connection> connection, uint32_t events);
  void drop(int fd);
  std::recursive_mutex mutex;  // sinks may be told things while it is held, and call back
  std::map<Token, SinkPtr> expected;
  RootTable roots;
  Address address;
  Token unix_name;

 private:
  void loop();
  void accept_all(int listener);
  void serve(int fd, uint32_t events);
  bool read_some(Connection& c);
  bool fill(Connection& c, void* into, size_t size);
  bool on_hello(Connection& c);
  bool read_frames(Connection& c);
  void expire();
  Fd epoll_, wake_;
  std::vector<Fd> listeners_;
  std::set<std::string> extra_;
  std::map<int, std::unique_ptr<Connection>> connections_;
};

Service* g_service = nullptr;
std::mutex g_service_mutex;

bool Service::start(std::string* why) {
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (pick_interface(&address) != ncclSuccess) return *why = last_error(), false;
  if (!add_listener(address, why)) return false;
  unix_name = Token::random();
  Fd local(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  int len = snprintf(un.sun_path + 1, sizeof un.sun_path - 1, "pynccl-%016lx%016lx",
                     (unsigned long)unix_name.a, (unsigned long)unix_name.b);
  socklen_t size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(len));
  if (!local || bind(local.get(), reinterpret_cast<sockaddr*>(&un), size) != 0 ||
      listen(local.get(), 1024) != 0)
    return *why = std::string("cannot open a Unix socket: ") + strerror(errno), false;
  epoll_event event{EPOLLIN, {.fd = local.get()}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, local.get(), &event);
  listeners_.push_back(std::move(local));
  std::thread([this] { loop(); }).detach();
  return true;
}

bool Service::add_listener(Address at, std::string* why) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (extra_.count(at.str())) return true;
  std::string asked = at.str();
  Fd fd = listen_on(&at, why);
  if (!fd) return false;
  if (listeners_.empty()) address = at;
  extra_.insert(asked);
  epoll_event event{EPOLLIN, {.fd = fd.get()}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd.get(), &event);
  std::lock_guard<std::mutex> sockets(g_sockets_mutex);
  open_sockets().insert(fd.get());
  listeners_.push_back(std::move(fd));
  return true;
}

void Service::add(const SocketPtr& socket, std::unique_ptr<Connection> connection, uint32_t events) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  connection->socket = socket;
  connections_[socket->fd()] = std::move(connection);
  epoll_event event{events, {.fd = socket->fd()}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket->fd(), &event);
}

void Service::drop(int fd) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  connections_.erase(it);
}

void Service::loop() {
  name_this_thread("pynccl-service");
  epoll_event events[64];
  for (;;) {
    int n = epoll_wait(epoll_.get(), events, 64, 50);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (int i = 0; i < n; ++i) {
      int fd = events[i].data.fd;
      bool listener = false;
      for (auto& l : listeners_) listener = listener || l.get() == fd;
      if (listener)
        accept_all(fd);
      else
        serve(fd, events[i].events);
    }
    expire();
  }
}

void Service::accept_all(int listener) {
  // One per event: level-triggered, and the listener blocks.
  int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return;
  auto connection = std::make_unique<Connection>();
  connection->deadline = after_ms(10000);
  add(std::make_shared<Socket>(Fd(fd)), std::move(connection), EPOLLIN);
}

void Service::serve(int fd, uint32_t events) {
  auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  Connection& c = *it->second;
  if (c.stage == Connection::Data) return c.sink->data_ready();
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) {
    SocketPtr keep = c.socket;
    if (read_some(c)) return;
    it = connections_.find(fd);
    if (it == connections_.end() || it->second->socket != keep) return;
    std::unique_ptr<Connection> gone = std::move(it->second);
    drop(fd);
    if (gone->stage == Connection::Control) gone->sink->closed(gone->rank);
    if (gone->stage == Connection::Joined) roots.left(gone->hello.token, gone->socket);
  }
}

// Takes what has arrived up to `size` bytes of `into` in all; false when the connection has ended.
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

bool Service::read_some(Connection& c) {
  if (c.stage == Connection::AwaitHello) {
    if (!fill(c, &c.hello, sizeof c.hello)) return false;
    return c.got < sizeof c.hello || on_hello(c);
  }
  if (c.stage == Connection::AwaitJoin) {
    if (!fill(c, &c.join, sizeof c.join)) return false;
    if (c.got < sizeof c.join) return true;
    c.stage = Connection::Joined;
    c.deadline = kForever;
    return roots.joined(c.hello.token, c.join, c.socket);
  }
  if (c.stage == Connection::Control) return read_frames(c);
  char byte;  // Joined: nothing more is said by a rank that waits for its table
  ssize_t n = recv(c.socket->fd(), &byte, 1, MSG_DONTWAIT);
  return n < 0 && (errno == EAGAIN || errno == EINTR);
}

bool Service::on_hello(Connection& c) {
  c.got = 0;
  if (c.hello.magic != Hello().magic) return false;
  if (c.hello.kind == HelloKind::Join) {
    if (!roots.known(c.hello.token)) return false;
    c.stage = Connection::AwaitJoin;
    return true;
  }
  auto it = expected.find(c.hello.token);
  if (it == expected.end()) return false;
  SinkPtr sink = it->second;
  SocketPtr socket = c.socket;
  Hello hello = c.hello;
  drop(socket->fd());  // c is gone
  sink->arrived(hello, socket);
  return true;
}

bool Service::read_frames(Connection& c) {
  for (;;) {
    if (c.got < sizeof c.header) {
      if (!fill(c, &c.header, sizeof c.header)) return false;
      if (c.got < sizeof c.header) return true;
      if (c.header.bytes > kMaxFrame) return false;
      c.body.assign(c.header.bytes, 0);
    }
    size_t have = c.got - sizeof c.header;
    while (have < c.body.size()) {
      ssize_t n = recv(c.socket->fd(), c.body.data() + have, c.body.size() - have, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return c.got = sizeof c.header + have, true;
      if (n <= 0) return false;
      have += size_t(n);
    }
    c.got = 0;
    c.sink->frame(c.rank, c.header, std::move(c.body));
    c.body.clear();
  }
}

void Service::expire() {
  Deadline now = Clock::now();
  roots.expire(now);
  for (auto it = connections_.begin(); it != connections_.end();) {
    int fd = it->first;
    Connection& c = *it->second;
    // A rank that is stopped does not come for its answer.
    if (c.stage == Connection::Joined && c.deadline == kForever && !roots.waits(c.hello.token, c.socket))
      c.deadline = now + std::chrono::seconds(1);
    bool late = c.deadline < now;
    ++it;
    if (late) drop(fd);
  }
}

void before_fork() {
  g_service_mutex.lock();
  if (g_service) g_service->mutex.lock();
  g_sockets_mutex.lock();
}
void after_fork_parent() {
  g_sockets_mutex.unlock();
  if (g_service) g_service->mutex.unlock();
  g_service_mutex.unlock();
}
// The child keeps nothing of the parent's: an open copy of a socket would hide the parent's death from its
// peers.
void after_fork_child() {
  g_generation.fetch_add(1);
  for (int fd : open_sockets()) close(fd);
  open_sockets().clear();
  g_service = nullptr;
  new (&g_sockets_mutex) std::mutex;
  new (&g_service_mutex) std::mutex;
  log_atfork_child();
}

Service* service(std::string* why) {
  std::lock_guard<std::mutex> lock(g_service_mutex);
  if (g_service) return g_service;
  static bool once = pthread_atfork(before_fork, after_fork_parent, after_fork_child) == 0;
  (void)once;
  auto fresh = std::make_unique<Service>();
  if (!fresh->start(why)) return nullptr;
  return g_service = fresh.release();
}

}  // namespace

Socket::Socket(Fd fd) : fd_(std::move(fd)) {
  std::lock_guard<std::mutex> lock(g_sockets_mutex);
  open_sockets().insert(fd_.get());
}
Socket::~Socket() {
  std::lock_guard<std::mutex> lock(g_sockets_mutex);
  // A forked child has closed it already, and the number may be another file's by now.
  if (!open_sockets().erase(fd_.get())) fd_.release();
}

bool Socket::send_frame(Ctl kind, uint64_t tag, const void* body, size_t bytes) {
  std::lock_guard<std::mutex> lock(write_);
  CtlHeader header{kind, uint32_t(bytes), tag};
  std::vector<char> frame(sizeof header + bytes);
  memcpy(frame.data(), &header, sizeof header);
  if (bytes) memcpy(frame.data() + sizeof header, body, bytes);
  return send_all(fd(), frame.data(), frame.size(), after_ms(5000));
}

uint32_t process_generation() { return g_generation.load(std::memory_order_relaxed); }

ncclResult_t describe_self(PeerInfo* info) {
  std::string why;
  Service* s = service(&why);
  if (!s) return fail(ncclSystemError, "cannot start the bootstrap service: %s", why.c_str());
  info->token = Token::random();
  info->unix_name = s->unix_name;
  info->host = host_id();
  info->pid = getpid();
  info->address = s->address;
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
    id->set_address(address);
    id->from_env = 1;
    return ncclSuccess;
  }
  std::string why;
  Service* s = service(&why);
  if (!s) return fail(ncclSystemError, "ncclGetUniqueId cannot start the bootstrap service: %s", why.c_str());
  id->token = Token::random();
  id->set_address(s->address);
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  s->roots.open(id->token, false);
  return ncclSuccess;
}

ncclResult_t open_env_root(const Id& id) {
  std::string why;
  Service* s = service(&why);
  if (!s) return fail(ncclSystemError, "cannot start the bootstrap service: %s", why.c_str());
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  if (!s->add_listener(id.address(), &why))
    return fail(ncclSystemError, "rank 0 cannot listen on NCCL_COMM_ID %s: %s", id.address().str().c_str(),
                why.c_str());
  s->roots.open(id.token, true);
  return ncclSuccess;
}

void expect(const Token& token, SinkPtr sink) {
  std::string why;
  if (Service* s = service(&why)) {
    std::lock_guard<std::recursive_mutex> lock(s->mutex);
    s->expected[token] = std::move(sink);
  }
}

void forget(const Token& token) {
  std::string why;
  if (Service* s = service(&why)) {
    std::lock_guard<std::recursive_mutex> lock(s->mutex);
    s->expected.erase(token);
  }
}

void watch_control(SocketPtr socket, int rank, SinkPtr sink) {
  std::string why;
  auto connection = std::make_unique<Connection>();
  connection->stage = Connection::Control;
  connection->rank = rank;
  connection->sink = std::move(sink);
  if (Service* s = service(&why)) s->add(socket, std::move(connection), EPOLLIN | EPOLLRDHUP);
}

void watch_data(SocketPtr socket, SinkPtr sink) {
  std::string why;
  auto connection = std::make_unique<Connection>();
  connection->stage = Connection::Data;
  connection->sink = std::move(sink);
  if (Service* s = service(&why))
    s->add(socket, std::move(connection), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

void unwatch(const SocketPtr& socket) {
  std::string why;
  if (!socket) return;
  if (Service* s = service(&why)) s->drop(socket->fd());
}

SocketPtr connect_peer(const PeerInfo& peer, bool local, HelloKind kind, int my_rank, Deadline deadline,
                       std::string* why) {
  Fd fd;
  if (local) {
    sockaddr_un un{};
    un.sun_family = AF_UNIX;
    int len = snprintf(un.sun_path + 1, sizeof un.sun_path - 1, "pynccl-%016lx%016lx",
                       (unsigned long)peer.unix_name.a, (unsigned long)peer.unix_name.b);
    fd.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socklen_t size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(len));
    if (!fd || connect(fd.get(), reinterpret_cast<sockaddr*>(&un), size) != 0)
      return *why = strerror(errno), nullptr;
  } else {
    fd = connect_to(peer.address, deadline, why, false);
    if (!fd) return nullptr;
  }
  Hello hello;
  hello.token = peer.token;
  hello.kind = kind;
  hello.rank = my_rank;
  if (!send_all(fd.get(), &hello, sizeof hello, deadline)) return *why = strerror(errno), nullptr;
  return std::make_shared<Socket>(std::move(fd));
}

bool send_fd(int socket, int fd) {
  char byte = 'f';
  iovec iov{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &fd, sizeof fd);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

Fd recv_fd(int socket, Deadline deadline) {
  char byte = 0;
  iovec iov{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  for (;;) {
    ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (Clock::now() > deadline) return errno = ETIMEDOUT, Fd();
      usleep(200);
      continue;
    }
    cmsghdr* c = n == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (!c || c->cmsg_type != SCM_RIGHTS) return errno = n == 0 ? ECONNRESET : EPROTO, Fd();
    int fd = -1;
    memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return Fd(fd);
  }
}

}  // namespace pncpu
