// The rendezvous from the side of a joining rank.
#pragma once

#include "service/service.hpp"

namespace pncpu {

// Joins the roots of the ids and returns everyone's PeerInfo. Bounded by `mine.seconds`.
ncclResult_t join(const std::vector<Id>& ids, const Announce& mine, const PeerInfo& info, Stop& stop,
                  Table* table);

// Tells the ranks that join with an id why its communicator will not be.
void end_id(const Id& id, const Announce& mine, const Failure& why, Stop& stop);

}  // namespace pncpu
