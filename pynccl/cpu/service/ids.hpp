// The unique ids that this process has made. A token follows from a key of this process and the id's serial
// number, so an id that was made costs nothing; of those that are done it is kept which, and of the newest
// what became of them.
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

  struct End {
    ncclResult_t result;
    std::string text;
  };
  void done(uint64_t serial, ncclResult_t result, const std::string& text);
  // Whether the id is done, and what to tell who comes with it.
  bool is_done(uint64_t serial, End* end) const;

 private:
  Token token_of(uint64_t serial) const;
  static constexpr size_t kMostEnds = 256, kMostRuns = 4096;
  std::string key_;
  uint64_t next_ = 1;
  std::map<uint64_t, uint64_t> runs_;  // first to last of serials that are done
  std::map<uint64_t, End> ends_;       // of the newest of them
};

}  // namespace pncpu
