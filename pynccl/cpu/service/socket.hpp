// A connected socket on which frames are sent without ever waiting: what the kernel does not take is sent by
// the service's thread when there is room.
#pragma once

#include <deque>
#include <mutex>

#include "service/wire.hpp"

namespace pncpu {

// Closed with its last owner, and at once in a forked child.
class Socket {
 public:
  explicit Socket(Fd fd) : fd_(std::move(fd)) {}
  int fd() const { return fd_.get(); }

  // One whole frame; false when the peer is gone or has read nothing for too long.
  bool send_frame(Ctl kind, uint64_t tag, Blob body);
  bool flush();  // as far as there is room; false when the peer is gone
  bool all_sent();
  void drain(Deadline deadline);  // waits until the kernel has taken everything, or the peer is gone

  // The service watches this socket with `epoll` for `events`, and for room while something is unsent.
  void watch(int epoll, uint32_t events);
  void unwatch();

  // Who is at the other end of a Unix socket, as the kernel saw it; pid 0 where it is not visible here.
  int64_t peer_pid() const;

 private:
  bool push();
  void want_room(bool wanted);
  Fd fd_;
  std::mutex mutex_;
  std::deque<Blob> unsent_;
  size_t unsent_bytes_ = 0, sent_of_first_ = 0;
  bool gone_ = false, wants_room_ = false;
  int epoll_ = -1;
  uint32_t events_ = 0;
};
using SocketPtr = std::shared_ptr<Socket>;

// A connection to an abstract Unix socket; an empty Fd with errno and *why set on failure.
Fd connect_unix(const Token& name, Deadline deadline, std::string* why, const std::atomic<bool>* stop);
Fd listen_unix(const Token& name);  // an empty Fd with errno set on failure

// Hands an open file to the other end of a Unix socket.
bool send_fd(int socket, int fd);
Fd recv_fd(int socket, Deadline deadline);

}  // namespace pncpu
