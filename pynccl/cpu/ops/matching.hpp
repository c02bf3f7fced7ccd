// The first phase of every operation: the ranks exchange and compare headers of their calls. It does not
// depend on how the data moves afterwards.
#pragma once

#include <vector>

#include "ops/context.hpp"
#include "ops/routes.hpp"

namespace pncpu {

// Copies the header at the head of a pipe without consuming it. Returns the number of readable bytes
// including the header; 0: it has not arrived completely.
size_t hear_header(Pipe& pipe, Header* header);
// Checks the rest of a peer's header for the same call: sequence number and payload must be what this library
// sends.
Step check_header(const Context& context, int from, const Header& theirs, uint64_t seq, bool is_inline,
                  size_t payload);

// The data of a collective comes with its headers if its Op::bytes() are at most these. The answer is the
// same on all ranks.
size_t most_with_header(const Context& context, Func func);
// Whether larger calls of a function are cut into pieces of that size, if no rank lends memory: what all show
// on a board is copied less often than what goes through the pipes of pairs.
bool cuts(const Context& context, Func func);

// What a rank passes on of another one; the data follow.
struct Passed {
  uint64_t origin;
  Header header;
};

// For collectives: all ranks exchange headers. The data of small calls comes with the header. A rank shows
// its header once to all ranks of its host (Board). Those of other hosts get it by Routes.
class Matching {
 public:
  explicit Matching(const Context& context) : context_(context) {}
  // `op` must live until the end. `lent`, by rank: Header::lent.
  void start(const Op& op, uint64_t seq, uint64_t windows, const std::vector<uint32_t>& lent);
  // The same for a piece of the call before, which programs do not count.
  void start_piece(const Op& piece, uint64_t seq);
  // Whether a rank has windows open, or lends registered memory to another one: all ranks know it.
  bool lent_by_any() const;
  // Done: all ranks have made the same call. Failed: the communicator has failed.
  Step step();
  const Header& mine() const { return mine_; }
  const Header& header(int rank) const { return peers_[size_t(rank)].header; }
  // What this rank gets of the data that came with a peer's header, or all that it shows itself; valid until
  // the next start().
  const char* payload(int peer) const { return peers_[size_t(peer)].payload; }
  // Ranks that have not called. Those whose headers an absent rank was to pass on are not among them.
  std::vector<int> missing() const;
  // The number of this call for messages.
  uint64_t number() const { return mine_.seq - uncounted_; }

 private:
  struct Peer {
    Header header;
    bool heard = false;
    uint32_t lent = 0;
    const char* payload = nullptr;  // what this rank gets of it
    std::vector<char> kept;         // what has come of it from another host
    size_t awaited = 0;             // headers that it is to pass on to this rank
  };
  bool show();
  void fill(char* data, size_t bytes) const;
  bool pass_on();
  size_t pack(const Routes::Way& way, size_t at);
  Step hear();
  Step look_at(int p, Peer& peer);
  Step hear_by(int bearer, size_t* awaited);
  Step mismatch(int from);
  bool all_here() const;
  bool here(int p) const { return bool(context_.link(p).board); }
  Part part(int from, int to) const;
  Part passed_part(int origin, int to) const;
  const Routes& routes() const { return relayed_ ? relayed_routes_ : direct_routes_; }

  const Context& context_;
  const Op* op_ = nullptr;
  bool shown_ = false, lends_ = false;
  bool relayed_ = false;  // headers come by other ranks, with all data that any rank needs
  Header mine_;
  uint64_t uncounted_ = 0;  // exchanges so far that programs do not count
  std::vector<Peer> peers_;
  Routes relayed_routes_, direct_routes_;
  std::vector<size_t> passed_;  // by way: how many of `known_` it has passed
  std::vector<int> known_;      // this rank, and those of other hosts whose headers are here
  std::vector<char> batch_;
};

}  // namespace pncpu
