// The calls of one group on one communicator. It runs when it has the turn.
#pragma once

#include <memory>
#include <vector>

#include "ops/ops.hpp"

namespace pncpu {

struct Comm;

struct Batch {
  std::shared_ptr<Comm> comm;
  uint64_t ticket = 0;
  std::vector<Op> colls, p2p, one_sided;
  bool started = false, done = false;
  ncclResult_t result = ncclSuccess;
  size_t at = 0;
  uint32_t seen = 0;  // the bell's count before the last look
};

}  // namespace pncpu
