// Registered memory (ncclCommRegister) that peers on the host map. Registration is local, so the owner offers
// its memory, a peer maps it and says so, and from then on the headers of the owner's calls tell that peer
// which buffers it may use: both plan such a call the same way.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/file_part.hpp"
#include "ops/mappings.hpp"

namespace pncpu {

// The body of Ctl::Lend.
struct Offer {
  uint64_t number = 0;   // of the owner's offers
  uint64_t address = 0;  // in the owner's process
  FilePart part;
};

class Loans {
 public:
  // The owner's side. No offer: the memory lies in no file.
  std::optional<Offer> offer(const void* handle, const void* at, size_t size);
  void taken(int peer, uint64_t number);
  // Returns the offer's number and the last call that may use it.
  struct End {
    uint64_t number, call;
  };
  std::optional<End> withdraw(const void* handle);

  // The peer's side. False: it cannot be mapped.
  bool borrow(int owner, int64_t pid, const Offer& offer);
  void give_back(int owner, const End& end);
  void finished(uint64_t call);  // this rank has finished a call that took now()

  // What is lent and borrowed at the start of a call; nullptr: nothing.
  std::shared_ptr<const Mappings> now(uint64_t call);

 private:
  struct Area {
    uint64_t address = 0, size = 0;
    bool holds(uint64_t at, size_t bytes) const {
      return at >= address && bytes <= size && at - address <= size - bytes;
    }
  };
  struct Lent : Area {
    std::shared_ptr<const void> memory;
    std::vector<int> takers;
  };
  struct Borrowed : Area {
    int owner = 0;
    std::shared_ptr<char> mapped;
    std::optional<uint64_t> until;  // the last call that may use it
  };
  class Snapshot;

  mutable std::mutex mutex_;
  std::map<uint64_t, Lent> lent_;                          // by number
  std::map<const void*, uint64_t> numbers_;                // by the registration's handle
  std::map<std::pair<int, uint64_t>, Borrowed> borrowed_;  // by owner and number
  uint64_t offers_ = 0, started_ = 0, finished_ = 0;
  std::shared_ptr<const Snapshot> snapshot_;  // of the last now(); nullptr after a change
};

}  // namespace pncpu
