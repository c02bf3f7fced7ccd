// The algorithms for ranks of several hosts, of which at least one has several. Every part of the data
// crosses the network once for each host that needs it: the ranks of a host combine what they send to a
// part's owner, and pass on to each other what one of them has received.
//
// A part belongs to a rank, its owner. On each other host the owner's partner (Layout) handles the part.
#pragma once

#include "ops/algorithms.hpp"

namespace pncpu {

// all_reduce: each part is reduced on every host, then by its owner, who sends it to all.
void all_reduce_across_hosts(const Call& call, Schedule* schedule);
// reduce_scatter: the same without the sending.
void reduce_scatter_across_hosts(const Call& call, Schedule* schedule);
// reduce: the ranks of the root's host own the parts, and send them to the root.
void reduce_across_hosts(const Call& call, Schedule* schedule);
void all_gather_across_hosts(const Call& call, Schedule* schedule);
// broadcast: the ranks of the root's host own the parts; each part goes from host to host.
void broadcast_across_hosts(const Call& call, Schedule* schedule);

}  // namespace pncpu
