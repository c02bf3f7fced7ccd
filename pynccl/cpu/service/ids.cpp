#include "service/ids.hpp"

namespace pncpu {

IdBook::IdBook() {
  Token half[2] = {Token::random(), Token::random()};
  key_.assign(reinterpret_cast<const char*>(half), sizeof half);
}

Token IdBook::token_of(uint64_t serial) const {
  Digest digest = hmac_sha256(key_, &serial, sizeof serial);
  Token token;
  memcpy(static_cast<void*>(&token), digest.data(), sizeof token);
  return token;
}

void IdBook::make(Id* id) {
  id->serial = next_++;
  id->token = token_of(id->serial);
}

bool IdBook::mine(const Token& token, uint64_t serial) const {
  Token expected = token_of(serial);
  return serial > 0 && serial < next_ && equal_in_constant_time(&token, &expected, sizeof token);
}

void IdBook::done(uint64_t serial, const Failure& end) {
  auto next = runs_.upper_bound(serial);
  if (next != runs_.begin() && std::prev(next)->second >= serial) return;
  ends_[serial] = end;
  if (ends_.size() > kMostEnds) ends_.erase(ends_.begin());
  uint64_t last = serial;
  if (next != runs_.end() && next->first == serial + 1) {
    last = next->second;
    next = runs_.erase(next);
  }
  if (next != runs_.begin() && std::prev(next)->second == serial - 1)
    std::prev(next)->second = last;
  else
    runs_[serial] = last;
  if (runs_.size() <= kMostRuns) return;
  // Merges the two oldest ranges: the ids between them count as used.
  auto second = std::next(runs_.begin());
  runs_.begin()->second = second->second;
  runs_.erase(second);
}

bool IdBook::is_done(uint64_t serial, Failure* end) const {
  auto next = runs_.upper_bound(serial);
  if (next == runs_.begin() || std::prev(next)->second < serial) return false;
  auto known = ends_.find(serial);
  if (known != ends_.end())
    *end = known->second;
  else
    *end = {ncclInvalidUsage, "this unique id was used long ago: an id makes one communicator", {}};
  return true;
}

}  // namespace pncpu
