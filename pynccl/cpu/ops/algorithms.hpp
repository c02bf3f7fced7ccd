// How each collective is done: one function an algorithm, which writes this rank's schedule.
#pragma once

#include "ops/ops.hpp"
#include "ops/schedule.hpp"

namespace pncpu {

// What an algorithm may look at.
struct Call {
  Func func;
  int root;
  size_t count, item;  // elements, and the size of one
  int rank, nranks;
  bool payloads;  // the data came with the headers
  std::vector<char>
      direct;  // by rank: each of the two reads and writes the other's buffers; as that one sees it
  size_t bytes() const { return count * item; }
};

struct Algorithm {
  const char* name;
  // Every rank must choose the same, so this may look only at what is equal everywhere: not at rank or
  // direct.
  bool (*fits)(const Call&);
  void (*plan)(const Call&, Schedule*);
};
// The first that fits.
const Algorithm& choose_algorithm(const Call& call);

}  // namespace pncpu
