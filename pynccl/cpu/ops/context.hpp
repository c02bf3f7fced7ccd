// What an operation knows of the communicator that runs it, and all that it may do to it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ops/ops.hpp"
#include "transport/transport.hpp"

namespace pncpu {

struct Context {
  int rank = 0, nranks = 1;
  size_t inline_bytes = 0;   // messages up to this size travel with their header; equal on all ranks
  size_t block_bytes = 0;    // reduced at a time; a multiple of every datatype's size
  std::vector<Link*> links;  // by rank; nullptr for this one
  // Ends the communicator with its first error, which the peers are told. Always Step::Failed.
  std::function<Step(ErrorCode, const std::string&)> fail;

  Link& link(int peer) const { return *links[size_t(peer)]; }
  Step mismatch(const std::string& text) const { return fail(kMismatch, kMismatchText + text); }
  std::string who(int peer) const { return "rank " + std::to_string(peer) + " (" + link(peer).name + ")"; }
  // Wakes the peers that were given bytes or room since the last time.
  void ring_peers() const;
  // For a blocked operation: Failed if it waits for a pipe that a peer has made unusable, else Blocked.
  Step blocked(Channel channel) const;
};

}  // namespace pncpu
