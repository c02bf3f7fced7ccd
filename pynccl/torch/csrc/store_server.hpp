// Whether the server of torch's store still listens.
#pragma once

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace pynccl {

// Most time that a connection may take, in microseconds.
constexpr suseconds_t kConnect = 200000;

inline bool connects(const addrinfo& at) {
  const int fd = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // Without a free descriptor nothing is known.
  if (fd < 0) return true;
  const timeval limit{0, kConnect};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const bool connected = connect(fd, at.ai_addr, at.ai_addrlen) == 0;
  close(fd);
  return connected;
}

// A TCPStore whose server has ended prints a warning with a stack of C++ before its client's error.
inline bool server_listens(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto inner = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  auto* tcp = dynamic_cast<c10d::TCPStore*>(inner.get());
  if (!tcp) return true;
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(tcp->getHost().c_str(), std::to_string(tcp->getPort()).c_str(), &hints, &found))
    return false;
  bool listens = false;
  for (auto* at = found; at && !listens; at = at->ai_next) listens = connects(*at);
  freeaddrinfo(found);
  return listens;
}

}  // namespace pynccl
