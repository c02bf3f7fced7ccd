#include "service/socket.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <sys/un.h>

#include "base/fork.hpp"

namespace pncpu {
namespace {

// A peer with more unread bytes counts as gone.
constexpr size_t kMostUnsent = size_t(64) << 20;
constexpr size_t kCopied = 4096;  // bodies up to this size are copied behind their header
// The most parts of one system call. The kernel keeps what one call sends in a buffer of its own, and a few
// hundred buffers fill a socket, however small they are.
constexpr size_t kMostParts = 64;

socklen_t unix_address(const Token& name, sockaddr_un* un) {
  *un = {};
  un->sun_family = AF_UNIX;
  int len = snprintf(un->sun_path + 1, sizeof un->sun_path - 1, "pynccl-%016lx%016lx",
                     static_cast<unsigned long>(name.a), static_cast<unsigned long>(name.b));
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(len));
}

}  // namespace

bool Socket::send_frame(Ctl kind, uint64_t tag, Blob body) {
  CtlHeader header{kind, uint32_t(body.size), tag};
  return send_frame(&header, sizeof header, std::move(body));
}

bool Socket::send_frame(const void* header, size_t bytes, Blob body) {
  return send_frames(frame(header, bytes, std::move(body)));
}

Frames Socket::frame(const void* header, size_t bytes, Blob body) {
  bool copied = body.size <= kCopied;
  std::vector<char> head(bytes + (copied ? body.size : 0));
  memcpy(head.data(), header, bytes);
  if (copied && body.size) memcpy(head.data() + bytes, body.data, body.size);
  Frames frames;
  frames.push_back(Blob::of(std::move(head)));
  if (!copied) frames.push_back(std::move(body));
  return frames;
}

bool Socket::send_frames(Frames frames) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (gone_ || unsent_bytes_ > kMostUnsent) return false;
  for (const Blob& part : frames) unsent_bytes_ += part.size;
  unsent_.splice(unsent_.end(), frames);
  return push();
}

bool Socket::push() {
  while (!unsent_.empty()) {
    iovec parts[kMostParts];
    msghdr message{};
    message.msg_iov = parts;
    size_t skip = sent_of_first_;
    for (const Blob& b : unsent_) {
      if (message.msg_iovlen == kMostParts) break;
      parts[message.msg_iovlen++] = {const_cast<char*>(b.data) + skip, b.size - skip};
      skip = 0;
    }
    ssize_t n = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return want_room(true), true;
    if (n < 0) {
      gone_ = true;
      unsent_.clear();
      unsent_bytes_ = 0;
      break;
    }
    sent_of_first_ += size_t(n);
    unsent_bytes_ -= size_t(n);
    sent_bytes_ += uint64_t(n);
    while (!unsent_.empty() && sent_of_first_ >= unsent_.front().size) {
      sent_of_first_ -= unsent_.front().size;
      unsent_.pop_front();
    }
  }
  want_room(false);
  return !gone_;
}

void Socket::want_room(bool wanted) {
  if (wanted == wants_room_) return;
  wants_room_ = wanted;
  if (epoll_ >= 0) control(EPOLL_CTL_MOD);
}

int Socket::control(int what) {
  epoll_event event{events_ | (wants_room_ ? uint32_t(EPOLLOUT) : 0), {.fd = key_}};
  return epoll_ctl(epoll_, what, fd(), &event);
}

void Socket::await_room(bool wanted) {
  std::lock_guard<std::mutex> lock(mutex_);
  want_room(wanted);
}

bool Socket::flush() {
  std::lock_guard<std::mutex> lock(mutex_);
  return push();
}

bool Socket::all_sent() {
  std::lock_guard<std::mutex> lock(mutex_);
  return unsent_.empty();
}

size_t Socket::unsent() {
  std::lock_guard<std::mutex> lock(mutex_);
  return unsent_bytes_;
}

Deadline Socket::drain(Deadline deadline, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t until = sent_bytes_ + unsent_bytes_;
  while (push() && sent_bytes_ < until) {
    lock.unlock();
    if (!wait_writable(fd(), deadline)) break;
    deadline = std::max<Deadline>(deadline, Clock::now() + patience);
    lock.lock();
  }
  return deadline;
}

void Socket::watch(int epoll, uint32_t events, int key) {
  std::lock_guard<std::mutex> lock(mutex_);
  epoll_ = epoll;
  events_ = events;
  key_ = key < 0 ? fd() : key;
  if (control(EPOLL_CTL_ADD) == 0) return;
  epoll_ = -1;
  throw std::bad_alloc();  // ENOMEM, or the user's limit of watches
}

// Data that nobody has read are reported once.
void Socket::watch_edges(int epoll, int key) {
  by_edges_ = true;
  watch(epoll, EPOLLIN | EPOLLRDHUP | EPOLLET, key);
}

void Socket::unwatch() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (epoll_ >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd(), nullptr);
  epoll_ = -1;
}

void Socket::rearm() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (epoll_ >= 0) control(EPOLL_CTL_MOD);
}

int64_t Socket::peer_pid() const {
  ucred who{};
  socklen_t size = sizeof who;
  return getsockopt(fd(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 ? who.pid : 0;
}

Fd listen_unix(const Token& name) {
  sockaddr_un un;
  socklen_t size = unix_address(name, &un);
  Fd fd = Fd::made_by([] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd || bind(fd.get(), reinterpret_cast<sockaddr*>(&un), size) != 0 || listen(fd.get(), 4096) != 0)
    return {};
  return fd;
}

Fd try_connect_unix(const Token& name) {
  sockaddr_un un;
  socklen_t size = unix_address(name, &un);
  Fd fd = Fd::made_by([] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd || connect(fd.get(), reinterpret_cast<sockaddr*>(&un), size) == 0) return fd;
  int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

Fd connect_unix(const Token& name, Deadline deadline, std::string* why, const std::atomic<bool>* stop) {
  sockaddr_un un;
  socklen_t size = unix_address(name, &un);
  Fd fd = Fd::made_by([] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  for (;;) {
    if (fd && connect(fd.get(), reinterpret_cast<sockaddr*>(&un), size) == 0) break;
    // EAGAIN: the listener's backlog is full.
    bool again = fd && (errno == EAGAIN || errno == EINTR) && Clock::now() < deadline && !(stop && *stop);
    if (!again) return *why = describe_error(errno), Fd();
    usleep(1000);
  }
  if (fcntl(fd.get(), F_SETFL, 0) != 0) return *why = describe_error(errno), Fd();
  return fd;
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
  for (;;) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t n = 0;
    Fd received = Fd::made_by([&] {
      n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
      cmsghdr* c = n == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
      int fd = -1;
      if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
      return fd;
    });
    if (received) return received;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      if (!wait_readable(socket, deadline)) return {};
      continue;
    }
    if (n < 0) return {};
    // Without a free descriptor the kernel truncates the control message.
    bool cut_off = n == 1 && (message.msg_flags & MSG_CTRUNC);
    return errno = cut_off ? EMFILE : n == 0 ? ECONNRESET : EPROTO, Fd();
  }
}

}  // namespace pncpu
