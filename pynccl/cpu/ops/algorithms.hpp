// The algorithms of the collectives. Each is one function that writes this rank's schedule.
#pragma once

#include "ops/ops.hpp"
#include "ops/schedule.hpp"

namespace pncpu {

// The input of an algorithm.
struct Call {
  Func func;
  int root;
  size_t count, item;  // elements, and the size of one
  int rank, nranks;
  bool payloads;             // the data came with the headers
  std::vector<char> direct;  // by rank: the pair uses each other's buffers
  size_t bytes() const { return count * item; }
};

struct Algorithm {
  const char* name;
  // Every rank must choose the same algorithm, so this must not read `rank` or `direct`, which differ.
  bool (*fits)(const Call&);
  void (*plan)(const Call&, Schedule*);
};
// The first that fits.
const Algorithm& choose_algorithm(const Call& call);

}  // namespace pncpu
