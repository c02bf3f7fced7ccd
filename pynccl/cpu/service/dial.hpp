// Reaching a process that listens: connecting, greeting, and the proof of the secret where there is one.
#pragma once

#include "service/service.hpp"

namespace pncpu {

// Connects and greets. nullptr after *why and errno were set.
SocketPtr dial(const Endpoint* endpoint, const Token* unix_name, const Hello& hello, Deadline deadline,
               bool retry_refused, Stop& stop, std::string* why);

// Connects to a rank of a communicator, over its Unix socket when it shares this host.
SocketPtr connect_peer(const PeerInfo& peer, bool local, HelloKind kind, int my_rank, Deadline deadline,
                       Stop& stop, std::string* why);

// Connects to a rank only to send it a frame, with the last descriptor where there is no other. Whether it
// was heard nobody knows.
void send_once(const PeerInfo& peer, bool local, int my_rank, Ctl kind, const Blob& body, Deadline deadline);

}  // namespace pncpu
