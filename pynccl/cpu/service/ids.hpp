// The unique ids of this process. The token follows from a key of the process and the id's serial number, so
// an unused id needs no memory. For used ids the book keeps their numbers, and for the newest ones their
// results.
#pragma once

#include <map>
#include <string>

#include "service/wire.hpp"

namespace pncpu {

class IdBook {
 public:
  IdBook();
  void make(Id* id);
  bool mine(const Token& token, uint64_t serial) const;

  void done(uint64_t serial, const Failure& end);
  // Whether the id was used, and the answer for a rank that joins with it.
  bool is_done(uint64_t serial, Failure* end) const;

 private:
  Token token_of(uint64_t serial) const;
  static constexpr size_t kMostEnds = 256, kMostRuns = 4096;
  std::string key_;
  uint64_t next_ = 1;
  std::map<uint64_t, uint64_t> runs_;  // ranges of used serials, first to last
  std::map<uint64_t, Failure> ends_;   // results of the newest used serials
};

}  // namespace pncpu
