// Processes that have nothing of the library's: they find where this one listens, connect, and say what the
// wire allows.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "gauge.hpp"
#include "service/wire.hpp"

namespace testing {

using namespace pncpu;

// ---- where this process listens ----

inline std::vector<unsigned long> own_sockets() {
  std::vector<unsigned long> inodes;
  for (auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    std::string to = fs::read_symlink(entry.path(), gone).string();
    unsigned long inode;
    if (!gone && sscanf(to.c_str(), "socket:[%lu]", &inode) == 1) inodes.push_back(inode);
  }
  return inodes;
}

inline std::vector<sockaddr_in> tcp_listeners() {
  std::vector<unsigned long> mine = own_sockets();
  std::vector<sockaddr_in> found;
  std::ifstream table("/proc/self/net/tcp");
  for (std::string line; std::getline(table, line);) {
    unsigned ip, port, state;
    unsigned long inode;
    if (sscanf(line.c_str(), " %*d: %8X:%4X %*s %2X %*s %*s %*s %*u %*d %lu", &ip, &port, &state, &inode) !=
        4)
      continue;
    if (state != 0x0a || !std::count(mine.begin(), mine.end(), inode)) continue;
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = ip;
    in.sin_port = htons(uint16_t(port));
    found.push_back(in);
  }
  CHECK(!found.empty());
  return found;
}

inline std::string unix_listener() {
  std::vector<unsigned long> mine = own_sockets();
  std::ifstream table("/proc/self/net/unix");
  for (std::string line; std::getline(table, line);) {
    unsigned flags;
    unsigned long inode;
    char name[128] = "";
    if (sscanf(line.c_str(), "%*s %*s %*s %x %*s %*s %lu %127s", &flags, &inode, name) != 3) continue;
    if (flags == 0x10000 && name[0] == '@' && std::count(mine.begin(), mine.end(), inode)) return name + 1;
  }
  FAIL_CHECK("this process listens on no Unix socket");
  return "";
}

// ---- connections ----

inline int connect_tcp(const sockaddr_in& to) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) return fd;
  close(fd);
  return -1;
}

inline int connect_unix_name(const std::string& name) {
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  memcpy(un.sun_path + 1, name.data(), name.size());
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&un),
              socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size())) == 0)
    return fd;
  close(fd);
  return -1;
}

// All that comes until the end of the connection or `seconds` have passed; false when it has not ended.
inline bool read_to_end(int fd, double seconds, std::string* got = nullptr) {
  for (double until = now() + seconds; now() < until;) {
    pollfd entry{fd, POLLIN, 0};
    if (poll(&entry, 1, int((until - now()) * 1000) + 1) <= 0) continue;
    char bytes[4096];
    ssize_t n = recv(fd, bytes, sizeof bytes, 0);
    if (n <= 0) return true;
    if (got) got->append(bytes, size_t(n));
  }
  return false;
}

inline bool read_exactly(int fd, void* into, size_t size) {
  for (size_t done = 0; done < size;) {
    pollfd entry{fd, POLLIN, 0};
    if (poll(&entry, 1, 10000) <= 0) return false;
    ssize_t n = recv(fd, static_cast<char*>(into) + done, size - done, 0);
    if (n <= 0) return false;
    done += size_t(n);
  }
  return true;
}

template <class T>
inline void put(int fd, const T& what) {
  if (send(fd, &what, sizeof what, MSG_NOSIGNAL) < 0) return;  // dropped already
}

inline int connect_patiently(const sockaddr_in& to) {
  for (double until = now() + 20; now() < until; pause_for(0.01))
    if (int fd = connect_tcp(to); fd >= 0) return fd;
  FAIL_CHECK("nobody listens");
  return -1;
}

// Keeps that many connections open, and sends nothing.
constexpr int kFlood = 400;

template <class Connect>
void hold_idle(Connect connect) {
  std::vector<int> fds(kFlood, -1);
  for (;;)
    for (int& fd : fds) {
      char byte;
      bool open = fd >= 0 && recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
      if (open) continue;
      if (fd >= 0) close(fd);
      fd = connect();
      if (fd < 0) pause_for(0.01);
    }
}

// ---- who knows the public id ----

// Sets a variable to a free address of this machine.
inline sockaddr_in use_free_address(const char* variable) {
  sockaddr_in in{};
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof in;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK_EQ(bind(fd, reinterpret_cast<sockaddr*>(&in), size), 0);
  CHECK_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&in), &size), 0);
  close(fd);
  set(variable, ("127.0.0.1:" + std::to_string(ntohs(in.sin_port))).c_str());
  return in;
}

inline sockaddr_in use_public_id() { return use_free_address("NCCL_COMM_ID"); }

inline Hello public_hello(int rank) {
  Hello hello;
  hello.token = Token::of(getenv("NCCL_COMM_ID"));
  hello.rank = rank;
  return hello;
}

inline Announce announce_as(int rank, int nranks) {
  Announce a;
  a.rank = rank;
  a.nranks = nranks;
  snprintf(a.host_name, sizeof a.host_name, "evil");
  return a;
}

inline void put_frame(int fd, Ctl kind, const void* body, size_t size, uint32_t claimed) {
  put(fd, CtlHeader{kind, claimed, 0});
  if (size && send(fd, body, size, MSG_NOSIGNAL) < 0) return;
}

}  // namespace testing
