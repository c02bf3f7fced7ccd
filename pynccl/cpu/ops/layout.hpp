// The hosts of a communicator's ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pncpu {

struct Layout {
  std::vector<std::vector<int>> hosts;  // the ranks of each, ascending; in the order of their first ranks
  std::vector<size_t> host, index;      // by rank: its host, and its place among the ranks there
  bool by_hosts = true;                 // the ranks of a host may share the work of a collective

  Layout() = default;
  // `ids`, by rank, are equal for ranks of one host.
  explicit Layout(const std::vector<uint64_t>& ids);
  bool spans_hosts() const { return hosts.size() > 1; }
  bool same_host(int a, int b) const { return host[size_t(a)] == host[size_t(b)]; }
  // The rank of a host that handles the part of `rank`, which is on another host. The parts spread evenly
  // over the ranks of the host.
  int partner(size_t of_host, int rank) const {
    const std::vector<int>& there = hosts[of_host];
    return there[index[size_t(rank)] % there.size()];
  }
};

}  // namespace pncpu
