// One thread a process that listens: ranks that join a unique id made here, peers that connect to a
// communicator's rank, control messages between ranks, and the silence of ranks that died.
#pragma once

#include <string>

#include "base/fork.hpp"
#include "service/socket.hpp"
#include "service/stop.hpp"
#include "service/wire.hpp"

namespace pncpu {

// Who is told of connections, control frames and readiness; always under the service's lock, nearly always in
// its thread.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void arrived(const Hello& hello, SocketPtr socket) = 0;
  virtual void frame(int rank, const CtlHeader& header, const Blob& body) = 0;
  virtual void closed(int rank) = 0;
  virtual void data_ready() = 0;
};
using SinkPtr = std::shared_ptr<Sink>;

// Makes a new id, whose root is this process, unless NCCL_COMM_ID is set and `from_env` wants it.
ncclResult_t make_id(Id* out, bool from_env);
// With NCCL_COMM_ID rank 0 opens the root at the given address itself.
ncclResult_t open_env_root(const Id& id);

// Fills this process's address, socket name and identity.
ncclResult_t describe_self(PeerInfo* info);

// A rank of this process: connections and frames that carry its token go to its sink. Frames of other ranks
// of this process are kept until it is attached.
void expect(const Token& token, SinkPtr sink);
void attach(const Token& token);
void forget(const Token& token);
bool lives_here(const Token& token);

// Ranks of one process talk without a socket. `link` says whether `to` is a rank of this process; then the
// rank `from`, whose own token is `mine`, hears of its end as closed(to_rank).
bool link(const Token& to, int to_rank, const Token& mine);
void post(const Token& to, int from, Ctl kind, uint64_t tag, const Blob& body);
void hang_up(const Token& to, int from);  // `to` hears closed(from)

void watch_control(SocketPtr socket, int rank, SinkPtr sink);
void watch_data(SocketPtr socket, SinkPtr sink);
void unwatch(const SocketPtr& socket);

inline uint32_t process_generation() { return process_epoch(); }

// Whether connections have waited for over a second because this process is out of descriptors.
bool starved();

}  // namespace pncpu
