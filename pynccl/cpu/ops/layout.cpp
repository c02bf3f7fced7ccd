#include "ops/layout.hpp"

#include <map>

namespace pncpu {

Layout::Layout(const std::vector<uint64_t>& ids) {
  std::map<uint64_t, size_t> known;
  for (size_t rank = 0; rank < ids.size(); ++rank) {
    size_t at = known.emplace(ids[rank], hosts.size()).first->second;
    if (at == hosts.size()) hosts.emplace_back();
    host.push_back(at);
    index.push_back(hosts[at].size());
    hosts[at].push_back(int(rank));
  }
}

}  // namespace pncpu
