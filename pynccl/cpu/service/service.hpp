// The service: one thread of the process that listens. It handles ranks that join a unique id of this
// process, peers that connect to a rank, lines to other processes (line.hpp), control messages between ranks,
// and the death of ranks.
#pragma once

#include <string>
#include <vector>

#include "base/fork.hpp"
#include "service/line.hpp"
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
  // Before attach(): a frame has been kept, or a line has opened or ended.
  virtual void news() {}
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

// Registers a rank of this process: its sink gets connections and frames with its token. Frames are kept
// until attach().
void expect(const Token& token, SinkPtr sink);
void attach(const Token& token);
void forget(const Token& token);
bool lives_here(const Token& token);
// Whether a frame that is kept tells of the end or the failure of a rank. Before link_lines() none does.
bool has_bad_news(const Token& token);

// Ranks of one process need no socket. link() returns whether `to` is a rank of this process. If so, the rank
// with the token `mine` gets closed(to_rank) when `to` ends.
bool link(const Token& to, int to_rank, const Token& mine);
void post(Posts posts);
void post(const Token& to, int from, Ctl kind, uint64_t tag, const Blob& body);
void hang_up(const Token& to, int from);  // `to` gets closed(from)

// Ranks of other processes are reached over lines. Links the rank of the table with this token with those of
// `missing` to whose process there is a line, and removes them from it. `dials`: a rank whose process this
// one must call (LineCall); -1: there is none.
struct Linked {
  int rank;
  LinePtr line;
};
std::vector<Linked> link_lines(const Token& mine, int rank, const Table& table, std::vector<int>* missing,
                               int* dials);
LinePtr line_to(const PeerInfo& peer, bool local);  // nullptr: there is none
size_t count_missing_lines(int rank, const Table& table);

// Only one rank of a process calls another process at a time. What becomes of it is news for all that are
// being created.
class LineCall {
 public:
  LineCall(const Token& process, bool local) : process_(process), local_(local) {}
  ~LineCall();
  LineCall(const LineCall&) = delete;
  LineCall& operator=(const LineCall&) = delete;
  void connected(SocketPtr socket);  // the service waits for the answer

 private:
  const Token process_;
  const bool local_;
  bool handed_over_ = false;
};
void watch_data(SocketPtr epoll, SinkPtr sink);  // a DataWatch's
void unwatch(const SocketPtr& socket);

// Whether connections have waited for more than a second because this process has no free descriptor.
bool starved();

// Whether this is the service's thread, which must never wait for another process.
bool in_service();

}  // namespace pncpu
