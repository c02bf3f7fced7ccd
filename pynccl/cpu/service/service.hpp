// One thread a process that listens: ranks that join a unique id made here, peers that connect to a
// communicator's rank, control messages between ranks, and the silence of ranks that died.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/core.hpp"

namespace pncpu {

struct Comm;

// What a rank tells the others about itself.
struct PeerInfo {
  Token token;      // opens connections to this rank of this communicator
  Token unix_name;  // abstract socket of its process
  uint64_t host = 0;
  int64_t pid = 0;
  uint64_t nonce_addr = 0;  // where its nonce lies in its memory: proof of identity for direct reads
  uint64_t nonce[2] = {0, 0};
  int32_t device = 0;
  int32_t version = kVersion;
  Address address;
  char host_name[64] = {};
};

enum class HelloKind : uint32_t { Join = 1, Control, CollData, P2pData };

struct Hello {
  uint64_t magic = 0x31306c63636e7970;  // "pynccl01"
  Token token;
  HelloKind kind = HelloKind::Join;
  int32_t rank = 0;
};

struct Join {
  int32_t rank = 0, nranks = 0;
  uint64_t ids_hash = 0;  // of all the ids, for ncclCommInitRankScalable
  PeerInfo info;
};

struct JoinReply {
  int32_t result = 0;
  uint32_t bytes = 0;  // of text (an error) or of the table of PeerInfo
};

// Control frames.
enum class Ctl : uint32_t { Leaving = 1, Error, Exchange, Stuck, Ready };
struct CtlHeader {
  Ctl kind = Ctl::Error;
  uint32_t bytes = 0;
  uint64_t tag = 0;
};
constexpr uint32_t kMaxFrame = 16u << 20;

// The 128 bytes of a unique id.
struct Id {
  uint64_t magic = 0x6469636c636e7970;  // "pynclcid"
  Token token;
  Address address() const;
  void set_address(const Address&);
  uint32_t family = 0;
  uint8_t ip[16] = {};
  uint32_t scope = 0;
  uint16_t port = 0;
  uint16_t from_env = 0;
  uint8_t pad[60] = {};
  bool plausible() const { return magic == Id().magic && port != 0; }
};
static_assert(sizeof(Id) <= 128, "an id is 128 bytes");

// Makes a new id, whose root is this process, unless NCCL_COMM_ID is set and `from_env` wants it.
ncclResult_t make_id(Id* out, bool from_env);
// With NCCL_COMM_ID rank 0 opens the root at the given address itself.
ncclResult_t open_env_root(const Id& id);

// Fills this process's address, socket name and identity.
ncclResult_t describe_self(PeerInfo* info);

// A connected socket; closed with its last owner, and at once in a forked child.
class Socket {
 public:
  explicit Socket(Fd fd);
  ~Socket();
  int fd() const { return fd_.get(); }
  // One whole control frame; false when the peer is gone or does not read.
  bool send_frame(Ctl kind, uint64_t tag, const void* body, size_t bytes);

 private:
  Fd fd_;
  std::mutex write_;
};
using SocketPtr = std::shared_ptr<Socket>;

// Joins the id's root and returns everyone's PeerInfo. Bounded by PYNCCL_CPU_INIT_TIMEOUT; it waits on
// `socket`, which whoever sets `stop` shuts down.
ncclResult_t join(const Id& id, const Join& mine, const std::atomic<bool>& stop, SocketPtr* socket,
                  std::vector<PeerInfo>* table);

// Who is told of connections, control frames and readiness; always in the service's thread.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void arrived(const Hello& hello, SocketPtr socket) = 0;
  virtual void frame(int rank, const CtlHeader& header, std::vector<char> body) = 0;
  virtual void closed(int rank) = 0;
  virtual void data_ready() = 0;
};
using SinkPtr = std::shared_ptr<Sink>;

void expect(const Token& token, SinkPtr sink);  // connections that carry the token go to sink
void forget(const Token& token);
void watch_control(SocketPtr socket, int rank, SinkPtr sink);
void watch_data(SocketPtr socket, SinkPtr sink);
void unwatch(const SocketPtr& socket);

// Connects to a rank of a communicator, over its Unix socket when it shares this host.
SocketPtr connect_peer(const PeerInfo& peer, bool local, HelloKind kind, int my_rank, Deadline deadline,
                       std::string* why);

// Hands an open file to the other end of a Unix socket.
bool send_fd(int socket, int fd);
Fd recv_fd(int socket, Deadline deadline);

// Counts forks between the first process and this one; what was made under another count is not ours.
uint32_t process_generation();

}  // namespace pncpu
