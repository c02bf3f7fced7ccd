// Connects to a listening process: connection, hello, and proof of the secret if there is one.
#pragma once

#include "service/service.hpp"

namespace pncpu {

// Connects and sends the hello. On failure nullptr, with *why and errno set.
SocketPtr dial(const Endpoint* endpoint, const Token* unix_name, const Hello& hello, Deadline deadline,
               Deadline retry_until, Stop& stop, std::string* why);

// Connects to a rank of a communicator; over its Unix socket if it is on this host.
SocketPtr connect_peer(const PeerInfo& peer, bool local, HelloKind kind, int my_rank, Deadline deadline,
                       Stop& stop, std::string* why);

// Sends one frame to a rank to which there is no line; uses the spare descriptor if no other is left.
// Delivery is not confirmed.
void send_note(const PeerInfo& peer, bool local, int my_rank, Ctl kind, const Blob& body, Deadline deadline);

}  // namespace pncpu
