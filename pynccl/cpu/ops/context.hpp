// An operation's view of its communicator: what it can read, and the actions that it can take.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ops/layout.hpp"
#include "ops/mappings.hpp"
#include "ops/ops.hpp"
#include "transport/transport.hpp"

namespace pncpu {

struct PutHead;

struct Context {
  int rank = 0, nranks = 1;
  // Equal on all ranks: messages up to this size travel with their header, and what a rank sends to the
  // others of its host up to the second, if there is no other host.
  size_t inline_bytes = 0, shown_bytes = 0;
  size_t board_bytes = 0;    // of the smallest Board
  bool staged = false;       // all ranks are on one host, and none uses another's memory
  size_t block_bytes = 0;    // reduced at a time; a multiple of every datatype's size
  std::vector<Link*> links;  // by rank; nullptr for this one
  mutable PipeNews news;     // of the links' pipes
  Layout layout;
  Cell* cell = nullptr;  // this rank's; nullptr if it is alone on its host
  Board board;           // likewise
  // Fails the communicator and tells the peers. Always Step::Failed.
  std::function<Step(ErrorCode, const std::string&)> fail;
  // The windows that are open now; nullptr: none.
  std::function<std::shared_ptr<const Mappings>()> windows;
  // The registered memory that a collective call of this number may use; nullptr: none. Every call that takes
  // it then says that it has finished.
  std::function<std::shared_ptr<const Mappings>(uint64_t call)> registered;
  std::function<void(uint64_t call)> finished;
  // Frames of puts and signals, for peers whose memory this rank does not reach. post() needs room, which the
  // bell announces.
  std::function<bool(int peer)> has_room;
  std::function<void(int peer, const PutHead& head, const char* data, size_t bytes)> post;

  Link& link(int peer) const { return *links[size_t(peer)]; }
  Step mismatch(const std::string& text) const { return fail(kMismatch, kMismatchText + text); }
  std::string who(int peer) const { return "rank " + std::to_string(peer) + " (" + link(peer).name + ")"; }
  // Call this once, when the links have their pipes.
  void hear_pipes();
  // Wakes all peers on this host.
  void ring_host() const;
  // Wakes the peers that got bytes or room since the last call.
  void ring_peers() const;
  // For a blocked operation: Failed if a peer has corrupted a pipe of the channel, else Blocked.
  Step blocked(Channel channel) const;
};

}  // namespace pncpu
