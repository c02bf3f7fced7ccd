// The first phase of every operation: the ranks exchange and compare headers of their calls. It does not
// depend on how the data moves afterwards.
#pragma once

#include <vector>

#include "ops/context.hpp"

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

// For collectives: all ranks exchange headers. The data of small calls comes with the header. A rank shows
// its header once to all ranks of its host (Board), and sends it to every rank of other hosts.
class Matching {
 public:
  explicit Matching(const Context& context) : context_(context) {}
  // `op` must live until the end. `lent`, by rank: Header::lent.
  void start(const Op& op, uint64_t seq, uint64_t windows, const std::vector<uint32_t>& lent);
  // Done: all ranks have made the same call. Failed: the communicator has failed.
  Step step();
  const Header& mine() const { return mine_; }
  const Header& header(int rank) const { return peers_[size_t(rank)].header; }
  // The data that came with a peer's header; valid until release() consumes it.
  const char* payload(int peer);
  void release();
  std::vector<int> missing() const;  // ranks whose header has not arrived
  // The number of this call for messages.
  uint64_t number() const { return mine_.seq - uncounted_; }

 private:
  struct Peer {
    Header header;
    bool told = false, heard = false;
    uint32_t lent = 0;
    Part out{0, 0};  // of this rank's send buffer, sent with the header
    size_t in = 0;   // bytes that come with the peer's
    const char* payload = nullptr;
    std::vector<char> whole;  // a payload that lies in two pieces in its pipe
  };
  bool show();
  bool announce();
  Step hear(bool* all_here);
  Step hear(int p, Peer& peer);
  Step look_at(int p, Peer& peer);
  Step mismatch(int from);

  const Context& context_;
  const Op* op_ = nullptr;
  bool shown_ = false, lends_ = false;
  Header mine_;
  uint64_t uncounted_ = 0;  // exchanges so far that programs do not count
  std::vector<Peer> peers_;
};

}  // namespace pncpu
