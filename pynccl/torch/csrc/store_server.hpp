// Whether the server of torch's store has ended.
#pragma once

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace pynccl {

// Most time that a connection may take, in microseconds.
constexpr suseconds_t kConnect = 200000;

// 0, or why no connection is made.
inline int connect_error(const addrinfo& at) {
  const int fd = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const timeval limit{0, kConnect};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const int error = connect(fd, at.ai_addr, at.ai_addrlen) == 0 ? 0 : errno;
  close(fd);
  return error;
}

inline c10d::TCPStore* tcp_store(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return dynamic_cast<c10d::TCPStore*>(prefixed ? prefixed->getUnderlyingNonPrefixStore().get()
                                                : store.get());
}

// HOST:PORT of the store's server if it refuses connections; empty: it listens, or nothing is known.
inline std::string ended_server(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* tcp = tcp_store(store);
  if (!tcp) return "";
  const std::string port = std::to_string(tcp->getPort());
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(tcp->getHost().c_str(), port.c_str(), &hints, &found)) return "";
  bool refused = false, open = false;
  for (auto* at = found; at && !open; at = at->ai_next) {
    const int error = connect_error(*at);
    refused |= error == ECONNREFUSED;
    open = error == 0 || error == EINPROGRESS;
  }
  freeaddrinfo(found);
  return refused && !open ? tcp->getHost() + ":" + port : "";
}

}  // namespace pynccl
