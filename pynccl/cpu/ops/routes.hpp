// How the headers of a collective reach the ranks of other hosts.
#pragma once

#include <vector>

#include "ops/layout.hpp"

namespace pncpu {

// Ranks with one index on their hosts form a ring of hosts. In round k a rank passes on what it has to the
// one 2^k hosts behind it, so that log2(hosts) messages bring it the headers of its ring (Bruck's
// all-gather). What comes to a host it passes on to its neighbours there. On a host with fewer ranks than
// others some serve several rings. Each header reaches a rank once.
class Routes {
 public:
  // A rank to which this one passes headers on.
  struct Way {
    int to;
    size_t ring;
    size_t place;     // of the digit: 1, 8, 64...; 0: a neighbour
    size_t distance;  // hosts
  };

  Routes() = default;
  Routes(const Layout& layout, int rank);
  // Each rank sends its header to every rank of other hosts itself.
  static Routes direct(const Layout& layout, int rank);
  const std::vector<Way>& ways() const { return ways_; }
  bool passes(const Way& way, int origin) const;
  // The rank that brings the header of `origin`: always the same. This one itself for those of its own host.
  int bearer(int origin) const { return bearer_of(origin, rank_); }
  // The ranks on the way of a header to this one, without its origin; the last is the first that it meets.
  std::vector<int> bearers(int origin) const;

 private:
  static constexpr size_t kBase = 8;
  size_t distance(size_t from_host, size_t to_host) const;
  int bearer_of(int origin, int to) const;

  bool direct_ = false;
  const Layout* layout_ = nullptr;
  int rank_ = 0;
  std::vector<Way> ways_;
};

}  // namespace pncpu
