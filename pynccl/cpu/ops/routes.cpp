#include "ops/routes.hpp"

#include <algorithm>

namespace pncpu {

Routes::Routes(const Layout& layout, int rank) : layout_(&layout), rank_(rank) {
  size_t hosts = layout.hosts.size(), here = layout.host[size_t(rank)], rings = 0;
  const std::vector<int>& neighbours = layout.hosts[here];
  for (const std::vector<int>& ranks : layout.hosts) rings = std::max(rings, ranks.size());
  for (size_t ring = layout.index[size_t(rank)]; ring < rings; ring += neighbours.size())
    for (size_t place = 1; place < hosts; place *= kBase)
      for (size_t step = place; step < std::min(hosts, place * kBase); step += place) {
        const std::vector<int>& there = layout.hosts[(here + step) % hosts];
        ways_.push_back({there[ring % there.size()], ring, place, step});
      }
  for (int neighbour : neighbours)
    if (neighbour != rank && hosts > 1) ways_.push_back({neighbour, 0, 0, 0});
}

Routes Routes::direct(const Layout& layout, int rank) {
  Routes routes;
  routes.direct_ = true;
  routes.layout_ = &layout;
  routes.rank_ = rank;
  // Each rank begins with another one.
  int nranks = int(layout.host.size());
  for (int i = 1; i < nranks; ++i)
    if (int to = (rank + i) % nranks; !layout.same_host(rank, to)) routes.ways_.push_back({to, 0, 0, 0});
  return routes;
}

bool Routes::passes(const Way& way, int origin) const {
  if (direct_) return origin == rank_;
  size_t here = layout_->host[size_t(rank_)], passed = distance(layout_->host[size_t(origin)], here);
  if (way.place == 0) return passed > 0 && layout_->partner(here, origin) == rank_;
  return layout_->index[size_t(origin)] == way.ring && passed < way.place &&
         passed + way.distance < layout_->hosts.size();
}

std::vector<int> Routes::bearers(int origin) const {
  std::vector<int> ranks;
  for (int at = bearer_of(origin, rank_); at != origin; at = bearer_of(origin, at)) ranks.push_back(at);
  return ranks;
}

size_t Routes::distance(size_t from_host, size_t to_host) const {
  size_t hosts = layout_->hosts.size();
  return (to_host + hosts - from_host) % hosts;
}

int Routes::bearer_of(int origin, int to) const {
  size_t here = layout_->host[size_t(to)], passed = distance(layout_->host[size_t(origin)], here);
  if (passed == 0 || direct_) return origin;
  int server = layout_->partner(here, origin);
  if (server != to) return server;
  size_t place = 1, hosts = layout_->hosts.size();
  while (place * kBase <= passed) place *= kBase;
  size_t last = passed / place * place;
  return layout_->partner((here + hosts - last) % hosts, origin);
}

}  // namespace pncpu
