// The data that processes exchange: unique ids, descriptions of ranks, hellos, frames. All have a fixed size,
// or a length that is checked before memory is allocated.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/core.hpp"
#include "service/secret.hpp"

namespace pncpu {

// More ranks are refused before anything is allocated for them.
constexpr int kMostRanks = 65536;
// A rank has two rings to each other rank of its host, so memory grows with the square.
constexpr int kMostLocalRanks = 1024;
constexpr uint32_t kMaxFrame = 16u << 20;
constexpr uint32_t kMaxText = 4096;

// Immutable bytes with shared ownership.
struct Blob {
  std::shared_ptr<const void> owner;
  const char* data = nullptr;
  size_t size = 0;
  static Blob of(std::vector<char> bytes) {
    auto kept = std::make_shared<const std::vector<char>>(std::move(bytes));
    return {kept, kept->data(), kept->size()};
  }
  static Blob copy(const void* data, size_t size) {
    auto at = static_cast<const char*>(data);
    return of(std::vector<char>(at, at + size));
  }
  std::string text() const { return {data, std::min<size_t>(size, kMaxText)}; }
};

// An IP address and a port.
struct Endpoint {
  uint8_t ip[16] = {};
  uint32_t scope = 0;
  uint16_t family = 0, port = 0;
  static Endpoint of(const Address& address);
  Address address() const;
};

// The 128 bytes of a unique id.
struct Id {
  static constexpr uint64_t kMagic = 0x326469636c636e70;  // "pnclcid2"
  uint64_t magic = kMagic;
  Token token;
  uint64_t serial = 0;  // counts the ids of its process, from 1; 0: NCCL_COMM_ID
  uint64_t host = 0;    // of the root; its ranks prefer the Unix socket
  Token unix_name;
  Endpoint endpoint;
  uint8_t pad[48] = {};
  bool from_env() const { return serial == 0; }
  bool plausible() const { return magic == kMagic && endpoint.port != 0; }
};
static_assert(sizeof(Id) == 128, "an id is 128 bytes");

// The description that a rank sends when all ranks have joined.
struct PeerInfo {
  Token token;              // needed to connect to this rank of this communicator
  Token process;            // identifies its process; created with the service
  Token unix_name;          // abstract socket of its process
  uint64_t host = 0;        // equal for ranks that can share memory
  int64_t pid = 0;          // in its own pid namespace
  uint64_t nonce_addr = 0;  // address of its nonce: proves its identity for direct access
  uint64_t nonce[2] = {0, 0};
  int32_t device = 0;
  int32_t shared_devices = 0;  // how many its host has (PYNCCL_CPU_DEVICES); 0: the device is the rank's own
  int32_t version = NCCL_VERSION_CODE;
  Endpoint endpoint;
  char host_name[64] = {};
};

// The PeerInfo of all ranks in their order; the ranks of a process share it.
struct Table {
  Blob bytes;
  const PeerInfo& operator[](int rank) const { return reinterpret_cast<const PeerInfo*>(bytes.data)[rank]; }
  int size() const { return int(bytes.size / sizeof(PeerInfo)); }
  static Table of(std::vector<PeerInfo> infos) {
    auto kept = std::make_shared<const std::vector<PeerInfo>>(std::move(infos));
    return {{kept, reinterpret_cast<const char*>(kept->data()), kept->size() * sizeof(PeerInfo)}};
  }
};

enum class HelloKind : uint32_t {
  Join = 1,
  Line,  // of two processes (line.hpp)
  CollData,
  P2pData,
  Ask,     // how are your ranks? The token is that of a process, and the answer one frame (state.hpp)
  Note,    // frames as on a line; the end of the connection means nothing
  Segment  // a frame and the descriptor of the host's shared segment
};

// The first message of every connection.
struct Hello {
  static constexpr uint64_t kMagic = 0x33306c63636e7970;  // "pynccl03"
  uint64_t magic = kMagic;
  Token token;          // of a unique id or a rank
  uint64_t serial = 0;  // of the id
  Token nonce;
  Token process;  // the sender's
  HelloKind kind = HelloKind::Join;
  int32_t rank = 0;
  uint32_t secured = 0;  // this side has the job's secret
  uint32_t pad = 0;
};

// The answer to a Hello that is `secured`. A proof follows if both sides have a secret.
struct Challenge {
  uint32_t secured = 0, pad = 0;
  Token nonce;
  Digest proof{};
};

// The proof of one side of a connection that it has the secret, for this id and this purpose.
enum class Role : uint32_t { Listens = 1, Connects };
Digest proof(const std::string& secret, Role role, const Hello& hello, const Token& listener_nonce);

// The rendezvous. Every rank sends Announce. When all have, the root answers Gathered, every rank sends
// Introduce, and the root sends the Table to all. With several ids each root gathers a share of the ranks and
// sends the Share to the first of them, which forwards it to the root of the first id and gets the Table for
// its share.
enum class Ctl : uint32_t {
  Leaving = 1,
  Error,
  Disagree,  // the tag is the sequence of exchanges (kAfterFailure or 0), the body a text
  Exchange,
  Absent,  // the exchange with this tag failed here: this rank does nothing that follows it
  Probe,
  Verdict,
  Announce,
  Gathered,
  Introduce,
  Share,
  Table,
  Failed,   // the tag is the result, the body a Failure
  Closed,   // a rank has ended its link
  Segment,  // the tag is the size of its rings; a descriptor follows
  Put,      // data for a window, or a signal
  Lend,     // registered memory that the peer may map: an Offer
  Taken,    // the peer has mapped it; the tag is the offer's number
  Return,   // no call from now on uses it; the tag is its number, the body the last call that may
  State,    // the answer to HelloKind::Ask
  Line,     // the answer to HelloKind::Line
  Link,     // a rank has linked itself with the other; the tag is that one's number, the body its own token
  Rest,     // nobody here uses the line (line.hpp); the tag is the number of the question
  Several,  // one frame for several ranks of the process (line.hpp)
  Dial      // connect to this rank, or accept its connection, for data of the channel that is the tag
};
// In the tags of exchanges of calls that go on after a failure.
constexpr uint64_t kAfterFailure = uint64_t(1) << 63;

struct CtlHeader {
  Ctl kind = Ctl::Error;
  uint32_t bytes = 0;
  uint64_t tag = 0;
};

// The body of Ctl::Error; the text follows.
struct ErrorHead {
  int32_t result = 0;
  uint8_t mismatch = 0, reported = 0;  // of ErrorCode
  uint8_t pad[2] = {};
};

// Why a rendezvous has ended. In a frame the ranks follow the text, behind a zero byte.
struct Failure {
  ncclResult_t result;
  std::string text;
  LateRanks late;
  static constexpr uint32_t kMostBytes = kMaxText + 1 + sizeof(LateRanks::ranks);
  Blob body() const;
  static Failure of(uint64_t tag, const Blob& body);
};

struct Announce {
  int32_t rank = 0, nranks = 0;
  uint64_t ids_hash = 0;  // of all the ids, for ncclCommInitRankScalable
  int32_t nids = 1;
  int32_t share = -1;  // the number of the Share that follows; -1: none
  int64_t pid = 0;
  double seconds = 0;  // that this rank waits for the others
  char host_name[64] = {};
};

// The distribution of ranks over the roots of several ids, as in NCCL (src/bootstrap.cc, rootIdFromRank,
// firstRankFromRoot and nRankFromRoot).
struct Shares {
  int nranks, nids;
  int of_rank(int rank) const {
    int longer = nranks % nids, least = nranks / nids, edge = longer * (least + 1);
    return rank < edge ? rank / (least + 1) : (rank - edge) / least + longer;
  }
  int first(int share) const { return share * (nranks / nids) + std::min(share, nranks % nids); }
  int count(int share) const { return nranks / nids + (share < nranks % nids); }
};

}  // namespace pncpu
