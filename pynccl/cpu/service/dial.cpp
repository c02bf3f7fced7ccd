#include "service/dial.hpp"

#include "service/process.hpp"

namespace pncpu {
namespace {

// Both sides prove the secret to each other, the listener first.
bool prove(const SocketPtr& socket, const Hello& hello, const std::string& secret, Deadline deadline,
           std::string* why) {
  Challenge challenge;
  if (!recv_all(socket->fd(), &challenge, sizeof challenge, deadline))
    return *why = describe_error(errno), false;
  errno = EACCES;
  if (!challenge.secured)
    return *why = "this process has a secret (PYNCCL_SECRET), the other has none", false;
  Digest expected = proof(secret, Role::Listens, hello, challenge.nonce);
  if (!equal_in_constant_time(expected.data(), challenge.proof.data(), expected.size()))
    return *why = "the other process has another secret (PYNCCL_SECRET) than this one", false;
  Digest mine = proof(secret, Role::Connects, hello, challenge.nonce);
  if (!send_all(socket->fd(), mine.data(), mine.size(), deadline)) return *why = describe_error(errno), false;
  return true;
}

}  // namespace

SocketPtr dial(const Endpoint* endpoint, const Token* unix_name, const Hello& greeting, Deadline deadline,
               bool retry_refused, Stop& stop, std::string* why) {
  Service* service = Service::get("a connection");
  if (!service) return *why = last_error(), nullptr;
  Fd fd = unix_name ? connect_unix(*unix_name, deadline, why, stop.flag())
                    : connect_to(endpoint->address(), deadline, why, retry_refused, stop.flag());
  if (!fd) return nullptr;
  auto socket = std::make_shared<Socket>(std::move(fd));
  std::string secret;
  {
    std::lock_guard<std::recursive_mutex> lock(service->mutex);
    secret = service->secret;
  }
  Hello hello = greeting;
  hello.nonce = Token::random();
  hello.secured = !secret.empty();
  Stop::During waiting(stop, [socket] { shutdown(socket->fd(), SHUT_RDWR); });
  if (!send_all(socket->fd(), &hello, sizeof hello, deadline)) return *why = describe_error(errno), nullptr;
  if (!secret.empty() && !prove(socket, hello, secret, deadline, why)) return nullptr;
  return socket;
}

SocketPtr connect_peer(const PeerInfo& peer, bool local, HelloKind kind, int my_rank, Deadline deadline,
                       Stop& stop, std::string* why) {
  Hello hello;
  hello.token = peer.token;
  hello.kind = kind;
  hello.rank = my_rank;
  return dial(&peer.endpoint, local ? &peer.unix_name : nullptr, hello, deadline, false, stop, why);
}

void send_once(const PeerInfo& peer, bool local, int my_rank, Ctl kind, const Blob& body, Deadline deadline) {
  Service* service = Service::get("a connection");
  if (!service) return;
  {
    std::lock_guard<std::recursive_mutex> lock(service->mutex);
    service->spare.reset();
  }
  {
    Stop never;
    std::string why;
    SocketPtr socket = connect_peer(peer, local, HelloKind::Control, my_rank, deadline, never, &why);
    if (socket && socket->send_frame(kind, 0, body)) socket->drain(deadline);
  }
  service->hold_spare();
}

}  // namespace pncpu
