// The algorithms of the collectives. Each is one function that writes this rank's schedule.
#pragma once

#include "ops/layout.hpp"
#include "ops/ops.hpp"
#include "ops/schedule.hpp"

namespace pncpu {

// What the choice of an algorithm depends on: it is the same on all ranks, and known before a call.
struct CallKind {
  Func func;
  int nranks;
  bool payloads;  // the data came with the headers
  bool few;       // so few bytes that each rank may compute all of a result
  bool cut;       // the data come with the headers of pieces
  const Layout* layout;
};

// The input of an algorithm.
struct Call : CallKind {
  int root;
  size_t count, item;  // elements, and the size of one
  size_t stride;       // bytes from the block of one rank to that of the next
  int rank;
  std::vector<char> direct;  // by rank: the pair uses each other's buffers
  size_t bytes() const { return count * item; }
};

struct Algorithm {
  const char* name;
  bool (*fits)(const CallKind&);
  void (*plan)(const Call&, Schedule*);
};
// The first that fits.
const Algorithm& algorithm_for(const CallKind& kind);

// Whether the ranks of a host share the work of a call whose data do not come with the headers.
bool goes_by_hosts(Func func, const Layout& layout);
// What a rank reads of the send buffer of a neighbour, `owner`, and writes in its receive buffer, if the pair
// uses each other's buffers.
struct Access {
  Part send, recv;
};
Access accessed(const Op& op, const Layout& layout, int owner, int by);

}  // namespace pncpu
