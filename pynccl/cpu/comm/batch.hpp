// The calls of one group on one communicator; runs when its turn comes.
#pragma once

#include <memory>
#include <vector>

#include "ops/ops.hpp"

namespace pncpu {

struct Comm;

struct Batch {
  std::shared_ptr<Comm> comm;
  uint64_t ticket = 0;
  std::vector<Op> colls, p2p;
  bool started = false, done = false;
  ncclResult_t result = ncclSuccess;
  size_t at = 0;
  uint32_t seen = 0;  // of the communicator's bell, before the newest look
};

}  // namespace pncpu
