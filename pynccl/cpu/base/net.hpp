// Sockets: addresses, the choice of an interface, and transfers bounded by a deadline.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <string>

#include "base/fork.hpp"
#include "base/nccl.hpp"

namespace pncpu {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;  // Deadline::max(): no deadline

struct Address {
  sockaddr_storage ss{};
  socklen_t len = 0;

  // "1.2.3.4:5", "[fe80::1%eth0]:5"; "" for no address. parse() reads it back.
  std::string str() const;
  int port() const;
  void set_port(int port);

  // <ipv4>:<port>, [<ipv6>]:<port> (scope ids too), <hostname>:<port>.
  static bool parse(const char* text, Address* out, std::string* why);
};

// Owns a file descriptor, which a forked child closes.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(NoFork().keep(fd)) {}
  // Owns the descriptor that `open` returns; no fork happens in between.
  template <class Open>
  static Fd made_by(Open open) {
    Fd made;
    NoFork no_fork;
    made.fd_ = no_fork.keep(open());
    return made;
  }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// Chooses an interface by NCCL_SOCKET_IFNAME (prefixes; ^ excludes, = is exact) and NCCL_SOCKET_FAMILY. By
// default the first interface that is up and not virtual or link-local, else docker's, else lo. The port is
// 0.
ncclResult_t pick_interface(Address* out);

// Binds that address only; port 0 is filled in. An empty Fd and *why on failure.
Fd listen_on(Address* addr, std::string* why);

// A blocking, connected socket with TCP_NODELAY. An empty Fd with errno and *why set on failure.
// `retry_until`: try again until then if the connection is refused, since the peer may not listen yet.
Fd connect_to(const Address& addr, Deadline deadline, std::string* why,
              Deadline retry_until = Deadline::max(), const std::atomic<bool>* stop = nullptr);

// False at the deadline (ETIMEDOUT) or on an error of poll itself.
bool wait_readable(int fd, Deadline deadline);
bool wait_writable(int fd, Deadline deadline);

// strerror; if no descriptor is left, also the limit that is reached.
std::string describe_error(int error);
inline bool out_of_descriptors(int error) { return error == EMFILE || error == ENFILE; }
struct Descriptors {
  size_t open, limit;
};
Descriptors count_descriptors();  // of this process

// All bytes, or false with errno set: ETIMEDOUT at the deadline, ECONNRESET when the peer closed, else the
// call's own.
bool send_all(int fd, const void* data, size_t size, Deadline deadline);
bool recv_all(int fd, void* data, size_t size, Deadline deadline);

}  // namespace pncpu
