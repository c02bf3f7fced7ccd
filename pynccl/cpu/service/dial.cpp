#include "service/dial.hpp"

#include <thread>

#include "service/process.hpp"

namespace pncpu {
namespace {

constexpr std::chrono::milliseconds kRest{20};

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

// A listener with many new connections ends those whose hello is late (admission.hpp). Where many threads
// share a processor, hellos are often late.
bool gave_up_on_a_late_hello(int error) { return error == EPIPE || error == ECONNRESET; }

}  // namespace

SocketPtr dial(const Endpoint* endpoint, const Token* unix_name, const Hello& greeting, Deadline deadline,
               Deadline retry_until, Stop& stop, std::string* why) {
  Service* service = Service::get("a connection");
  if (!service) return *why = last_error(), nullptr;
  std::string secret;
  {
    std::lock_guard<std::recursive_mutex> lock(service->mutex);
    secret = service->secret;
  }
  Hello hello = greeting;
  hello.secured = !secret.empty();
  for (;;) {
    Fd fd = unix_name ? connect_unix(*unix_name, deadline, why, stop.flag())
                      : connect_to(endpoint->address(), deadline, why, retry_until, stop.flag());
    if (!fd) return nullptr;
    auto socket = std::make_shared<Socket>(std::move(fd));
    hello.nonce = Token::random();
    Stop::During waiting(stop, [socket] { shutdown(socket->fd(), SHUT_RDWR); });
    if (send_all(socket->fd(), &hello, sizeof hello, deadline)) {
      if (!secret.empty() && !prove(socket, hello, secret, deadline, why)) return nullptr;
      return socket;
    }
    int error = errno;
    *why = describe_error(error);
    bool again = gave_up_on_a_late_hello(error) && !stop.is_set() && Clock::now() + kRest < deadline;
    if (!again) return errno = error, nullptr;
    std::this_thread::sleep_for(kRest);
  }
}

SocketPtr connect_peer(const PeerInfo& peer, bool local, HelloKind kind, int my_rank, Deadline deadline,
                       Stop& stop, std::string* why) {
  Service* service = Service::get("a connection");
  if (!service) return *why = last_error(), nullptr;
  Hello hello;
  hello.token = peer.token;
  hello.process = service->process;
  hello.kind = kind;
  hello.rank = my_rank;
  return dial(&peer.endpoint, local ? &peer.unix_name : nullptr, hello, deadline, Deadline::min(), stop, why);
}

void send_note(const PeerInfo& peer, bool local, int my_rank, Ctl kind, const Blob& body, Deadline deadline) {
  Service* service = Service::get("a connection");
  if (!service) return;
  {
    std::lock_guard<std::recursive_mutex> lock(service->mutex);
    service->spare.reset();
  }
  {
    Stop never;
    std::string why;
    SocketPtr socket = connect_peer(peer, local, HelloKind::Note, my_rank, deadline, never, &why);
    if (!socket) return service->hold_spare();
    Line note(socket);
    if (note.send(peer.token, my_rank, kind, 0, body)) note.drain(deadline);
  }
  service->hold_spare();
}

}  // namespace pncpu
