// A connected socket that sends frames without blocking: the service's thread sends what the kernel does not
// accept immediately.
#pragma once

#include <atomic>
#include <list>
#include <mutex>

#include "service/wire.hpp"

namespace pncpu {

using Frames = std::list<Blob>;

// Closes with its last owner; a forked child closes it immediately.
class Socket {
 public:
  explicit Socket(Fd fd) : fd_(std::move(fd)) {}
  int fd() const { return fd_.get(); }

  // Sends one whole frame; false: the peer has gone, or has left too much unread.
  bool send_frame(Ctl kind, uint64_t tag, Blob body);
  bool send_frame(const void* header, size_t bytes, Blob body);
  static Frames frame(const void* header, size_t bytes, Blob body);
  bool send_frames(Frames frames) noexcept;  // prepared by frame(); needs no memory
  bool flush();                              // sends as much as fits; false: the peer has gone
  bool all_sent();
  size_t unsent();  // bytes
  // Waits until the kernel has accepted everything that was sent before, or the peer has gone. Whenever the
  // kernel accepts a part, at least `patience` is left from then on. Returns the new deadline.
  Deadline drain(Deadline deadline, std::chrono::milliseconds patience = {});

  // Adds the socket to `epoll` for `events`, and for output while frames are unsent. `key`: by default the
  // descriptor.
  void watch(int epoll, uint32_t events, int key = -1);
  void unwatch();
  void rearm();                  // after an event, if it is watched with EPOLLONESHOT
  void await_room(bool wanted);  // for a pipe, which sends by itself

  // For a pipe whose socket is in a DataWatch: whether data may have come since the last read. A read begins
  // with reads(), and ends with data_came() if it has left some.
  bool may_have_data() const { return !by_edges_ || news_.load(std::memory_order_relaxed); }
  void reads() { news_.store(false, std::memory_order_relaxed); }
  void data_came() { news_.store(true, std::memory_order_relaxed); }
  void watch_edges(int epoll, int key);

  // The pid of the peer of a Unix socket, from the kernel; 0: not visible here.
  int64_t peer_pid() const;

 private:
  bool push();
  void want_room(bool wanted);
  int control(int what);
  Fd fd_;
  std::mutex mutex_;
  Frames unsent_;
  size_t unsent_bytes_ = 0, sent_of_first_ = 0;
  uint64_t sent_bytes_ = 0;
  bool gone_ = false, wants_room_ = false;
  int epoll_ = -1, key_ = -1;
  uint32_t events_ = 0;
  bool by_edges_ = false;
  std::atomic<bool> news_{true};
};
using SocketPtr = std::shared_ptr<Socket>;

// A connection to an abstract Unix socket; an empty Fd with errno and *why set on failure.
Fd connect_unix(const Token& name, Deadline deadline, std::string* why, const std::atomic<bool>* stop);
// One attempt that does not block, nor does the socket; an empty Fd with errno set on failure.
Fd try_connect_unix(const Token& name);
Fd listen_unix(const Token& name);  // an empty Fd with errno set on failure

// Passes an open file to the peer of a Unix socket.
bool send_fd(int socket, int fd);
Fd recv_fd(int socket, Deadline deadline);

}  // namespace pncpu
