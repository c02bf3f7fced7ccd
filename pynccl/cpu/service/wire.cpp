#include "service/wire.hpp"

#include <netinet/in.h>

namespace pncpu {

Blob Failure::body() const {
  std::vector<char> bytes(text.begin(),
                          text.begin() + std::ptrdiff_t(std::min<size_t>(text.size(), kMaxText)));
  bytes.push_back(0);
  auto ranks = reinterpret_cast<const char*>(late.ranks);
  bytes.insert(bytes.end(), ranks, ranks + size_t(late.count) * sizeof *late.ranks);
  return Blob::of(std::move(bytes));
}

Failure Failure::of(uint64_t tag, const Blob& body) {
  const auto result = ncclResult_t(uint32_t(tag));
  const bool known = result > ncclSuccess && result <= ncclTimeout && result != ncclInProgress;
  Failure failure{known ? result : ncclRemoteError, body.text(), {}};
  failure.text.resize(std::min(failure.text.size(), failure.text.find('\0')));
  for (size_t at = failure.text.size() + 1; at + sizeof(int) <= body.size; at += sizeof(int)) {
    int rank;
    memcpy(&rank, body.data + at, sizeof rank);
    failure.late.add(rank);
  }
  return failure;
}

Endpoint Endpoint::of(const Address& address) {
  Endpoint e;
  e.family = address.ss.ss_family;
  e.port = uint16_t(address.port());
  if (e.family == AF_INET) {
    memcpy(e.ip, &reinterpret_cast<const sockaddr_in*>(&address.ss)->sin_addr, 4);
  } else {
    auto* in = reinterpret_cast<const sockaddr_in6*>(&address.ss);
    memcpy(e.ip, &in->sin6_addr, sizeof e.ip);
    e.scope = in->sin6_scope_id;
  }
  return e;
}

Address Endpoint::address() const {
  Address a;
  if (family == AF_INET) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    memcpy(&in.sin_addr, ip, 4);
    memcpy(&a.ss, &in, sizeof in);
    a.len = sizeof in;
  } else {
    sockaddr_in6 in{};
    in.sin6_family = AF_INET6;
    in.sin6_scope_id = scope;
    memcpy(&in.sin6_addr, ip, sizeof ip);
    memcpy(&a.ss, &in, sizeof in);
    a.len = sizeof in;
  }
  a.set_port(port);
  return a;
}

Digest proof(const std::string& secret, Role role, const Hello& hello, const Token& listener_nonce) {
  struct {
    char purpose[16] = "pynccl cpu 3";
    Role role;
    HelloKind kind;
    int32_t rank;
    uint32_t pad = 0;
    uint64_t serial;
    Token id, process, connects, listens;
  } text;
  text.role = role;
  text.kind = hello.kind;
  text.rank = hello.rank;
  text.serial = hello.serial;
  text.id = hello.token;
  text.process = hello.process;
  text.connects = hello.nonce;
  text.listens = listener_nonce;
  return hmac_sha256(secret, &text, sizeof text);
}

}  // namespace pncpu
