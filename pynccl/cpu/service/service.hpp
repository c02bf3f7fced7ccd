// The service: one thread of the process that listens. It handles ranks that join a unique id of this
// process, peers that connect to a rank, control messages between ranks, and the death of ranks.
#pragma once

#include <string>
#include <vector>

#include "base/fork.hpp"
#include "service/socket.hpp"
#include "service/stop.hpp"
#include "service/wire.hpp"

namespace pncpu {

// Receives connections, control frames and readiness; always under the service's lock, nearly always in its
// thread.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void arrived(const Hello& hello, SocketPtr socket) = 0;
  virtual void frame(int rank, const CtlHeader& header, const Blob& body) = 0;
  virtual void closed(int rank) = 0;
  virtual void data_ready() = 0;
  // Appends the state of this rank (state.hpp); nothing before it knows its peers.
  virtual void describe(std::vector<char>*) {}
};
using SinkPtr = std::shared_ptr<Sink>;

// Creates an id whose root is this process. `from_env`: returns NCCL_COMM_ID if it is set.
ncclResult_t make_id(Id* out, bool from_env);
// With NCCL_COMM_ID rank 0 opens the root at that address.
ncclResult_t open_env_root(const Id& id);

// Fills this process's address, socket name and identity.
ncclResult_t describe_self(PeerInfo* info);

// Registers a rank of this process: its sink gets connections and frames with its token. Frames from ranks of
// this process are kept until attach().
void expect(const Token& token, SinkPtr sink);
void attach(const Token& token);
void forget(const Token& token);
bool lives_here(const Token& token);

// Ranks of one process need no socket. link() returns whether `to` is a rank of this process. If so, the rank
// with the token `mine` gets closed(to_rank) when `to` ends.
bool link(const Token& to, int to_rank, const Token& mine);
void post(const Token& to, int from, Ctl kind, uint64_t tag, const Blob& body);
void hang_up(const Token& to, int from);  // `to` gets closed(from)

void watch_control(SocketPtr socket, int rank, SinkPtr sink);
void watch_data(SocketPtr epoll, SinkPtr sink);  // a DataWatch's
void unwatch(const SocketPtr& socket);

inline uint32_t process_generation() { return process_epoch(); }

// Whether connections have waited for more than a second because this process has no free descriptor.
bool starved();

}  // namespace pncpu
