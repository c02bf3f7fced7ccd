// What travels between processes: unique ids, what ranks say of themselves, greetings, frames. All of fixed
// size, or with a length that is bounded before anything is made of it.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/core.hpp"
#include "service/secret.hpp"

namespace pncpu {

// More ranks than this are refused before anything is allocated for them.
constexpr int kMostRanks = 65536;
// A rank of a host keeps two rings to each other rank there, so memory grows with the square.
constexpr int kMostLocalRanks = 1024;
constexpr uint32_t kMaxFrame = 16u << 20;
constexpr uint32_t kMaxText = 4096;

// Bytes that several may own and nobody changes.
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
  uint64_t serial = 0;  // of its maker's ids, from 1; 0 for NCCL_COMM_ID
  uint64_t host = 0;    // the maker's, and its Unix socket, which ranks there prefer
  Token unix_name;
  Endpoint endpoint;
  uint8_t pad[48] = {};
  bool from_env() const { return serial == 0; }
  bool plausible() const { return magic == kMagic && endpoint.port != 0; }
};
static_assert(sizeof(Id) == 128, "an id is 128 bytes");

// What a rank tells the others about itself, once all agree on who is in.
struct PeerInfo {
  Token token;              // opens connections to this rank of this communicator
  Token process;            // of its process, made when its service began
  Token unix_name;          // abstract socket of its process
  uint64_t host = 0;        // equal for ranks that can share memory
  int64_t pid = 0;          // as it sees itself
  uint64_t nonce_addr = 0;  // where its nonce lies in its memory: proof of identity for direct reads
  uint64_t nonce[2] = {0, 0};
  int32_t device = 0;
  int32_t shared_devices = 0;  // how many its host has (PYNCCL_CPU_DEVICES); 0: the device is the rank's own
  int32_t version = NCCL_VERSION_CODE;
  Endpoint endpoint;
  char host_name[64] = {};
};

// Everyone's PeerInfo, in the order of their ranks; shared by the ranks of a process.
struct Table {
  Blob bytes;
  const PeerInfo& operator[](int rank) const { return reinterpret_cast<const PeerInfo*>(bytes.data)[rank]; }
  int size() const { return int(bytes.size / sizeof(PeerInfo)); }
  static Table of(std::vector<PeerInfo> infos) {
    auto kept = std::make_shared<const std::vector<PeerInfo>>(std::move(infos));
    return {{kept, reinterpret_cast<const char*>(kept->data()), kept->size() * sizeof(PeerInfo)}};
  }
};

enum class HelloKind : uint32_t { Join = 1, Control, CollData, P2pData };

// The first that is said on every connection.
struct Hello {
  static constexpr uint64_t kMagic = 0x32306c63636e7970;  // "pynccl02"
  uint64_t magic = kMagic;
  Token token;          // of a unique id or a rank
  uint64_t serial = 0;  // of the id
  Token nonce;
  HelloKind kind = HelloKind::Join;
  int32_t rank = 0;
  uint32_t secured = 0;  // this side has the job's secret
  uint32_t pad = 0;
};

// The answer to a Hello that is `secured`; a Proof follows where the secret stands on both sides.
struct Challenge {
  uint32_t secured = 0, pad = 0;
  Token nonce;
  Digest proof{};
};

// What one side of a connection shows the other: that it has the secret now, for this id and this purpose.
enum class Role : uint32_t { Listens = 1, Connects };
Digest proof(const std::string& secret, Role role, const Hello& hello, const Token& listener_nonce);

// The rendezvous. A rank sends Announce; when all have, the root answers Gathered; each sends Introduce; the
// root sends everyone the Table. With several ids each root gathers a share of the ranks; it sends the
// first of them the Share, who brings it to the first id's root and gets the Table for all.
enum class Ctl : uint32_t {
  Leaving = 1,
  Error,
  Exchange,
  Probe,
  Verdict,
  Announce,
  Gathered,
  Introduce,
  Share,
  Table,
  Failed,  // the tag is the result, the body a text
  Closed,  // never sent: a rank of this process has let go
  Segment  // the tag is the size of its rings; a descriptor follows
};
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

struct Announce {
  int32_t rank = 0, nranks = 0;
  uint64_t ids_hash = 0;  // of all the ids, for ncclCommInitRankScalable
  int32_t nids = 1;
  int32_t share = -1;  // whose Share comes, where the first ranks of the shares meet
  int64_t pid = 0;
  char host_name[64] = {};
};

// Which of several ids' roots a rank reports to, as NCCL spreads them (src/bootstrap.cc, rootIdFromRank,
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
