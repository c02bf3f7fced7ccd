// The root of a unique id: gathers the ranks, checks that they agree, and sends all of them the table.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "service/ids.hpp"
#include "service/wire.hpp"

namespace pncpu {

// Sends answers to a joining rank, over its connection or within this process.
class Seat {
 public:
  virtual ~Seat() = default;
  virtual void tell(Ctl kind, uint64_t tag, const Blob& body) = 0;
  virtual void close() {}                   // no more answers follow
  virtual std::string address() const = 0;  // of the rank
};
using SeatPtr = std::shared_ptr<Seat>;

// Only used under the service's lock.
class RootTable {
 public:
  IdBook ids;
  // Opens the root of NCCL_COMM_ID, which serves many communicators. Without a secret it is public: a joining
  // process counts as unauthenticated until all ranks have joined.
  void open_public(const Token& token, bool open_to_all) { public_[token].open_to_all = open_to_all; }
  bool serves(const Token& token, uint64_t serial) const;
  bool open_to_all(const Token& token) const;

  // Handles a message of a rank; false ends its connection.
  bool heard(const Token& token, uint64_t serial, const SeatPtr& seat, const CtlHeader& header,
             const Blob& body);
  // The maximum length of a body, checked before it is read.
  static uint32_t most_bytes(Ctl kind);
  void left(const Token& token, const SeatPtr& seat) noexcept;
  // A rank that knows the token cannot prove the secret.
  void unproved(const Token& token, uint64_t serial, const std::string& text);

  bool busy() const { return !timers_.empty(); }  // some ranks wait
  void expire(Deadline now);
  void shut(const std::string& why);  // no rank can connect to this process
  Deadline next_deadline() const { return timers_.empty() ? kForever : timers_.begin()->first; }

 private:
  struct Member {
    Announce announce;
    SeatPtr seat;
    bool introduced = false;
    PeerInfo info;
    Blob share;  // of the ranks that join at another id
  };
  // Ranks that wait for each other, or the first ranks of the shares.
  struct Round {
    std::vector<Member> members;
    std::map<int, size_t> seats;  // by rank or share
    size_t introduced = 0;
    void clear();
  };
  struct Root {
    Token token;
    uint64_t serial = 0;
    Round ranks, shares;
    int refused = 0;  // number of ranks that did not prove the secret
    std::string last_refused;
    Deadline deadline = kForever;
    double seconds = 0;  // the time-out that ends there
  };

  bool announced(Root& root, const SeatPtr& seat, const Announce& announce);
  bool introduced(Root& root, const SeatPtr& seat, const PeerInfo& info);
  bool brought(Root& root, const SeatPtr& seat, const Blob& share);
  bool relayed(Root& root, const Blob& table);
  bool reported(const Token& token, uint64_t serial, const Failure& failure);
  void complete(Root& root, const Table& table);
  void end(Root& root, const Failure& failure);
  void erase(Root& root);
  void set_deadline(Root& root, Deadline deadline);
  void wait_at_most(Root& root, const Announce& announce);
  Member* find(Round& round, const SeatPtr& seat);
  std::string who(const Root& root, const Member& member) const;
  Failure late(const Root& root) const;
  std::string joined(const Root& root, LateRanks* late = nullptr) const;

  struct Public {
    bool open_to_all = false;
    std::map<int, Announce> before;  // the ranks of the last communicator; at most kMostRemembered
  };
  static constexpr size_t kMostRemembered = 256;
  void note_change(const Root& root, const Member& member);

  std::map<Token, Public> public_;
  std::map<Token, Root> roots_;
  std::set<std::pair<Deadline, Token>> timers_;
};

}  // namespace pncpu
