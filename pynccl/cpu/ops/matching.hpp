// The first phase of every operation: the ranks tell each other what they call and compare. It knows nothing
// of how the data moves afterwards.
#pragma once

#include <vector>

#include "ops/context.hpp"

namespace pncpu {

// Reads the header at the head of a pipe and leaves it there. How many bytes are readable, with it; 0 while
// it has not come whole.
size_t hear_header(Pipe& pipe, Header* header);
// Whether a peer's header that describes the same call is also what this library sends with such a call.
Step check_header(const Context& context, int from, const Header& theirs, uint64_t seq, bool is_inline,
                  size_t payload);

// Of a collective: everyone to everyone. A small call's data comes with the header.
class Matching {
 public:
  explicit Matching(const Context& context) : context_(context) {}
  void start(const Op& op, uint64_t seq);
  // Done when all ranks have called the same; with Failed the communicator has its error.
  Step step();
  const Header& mine() const { return mine_; }
  const Header& header(int rank) const { return peers_[size_t(rank)].header; }
  // The data that came with a peer's header, until release() takes it out of the pipe.
  const char* payload(int peer);
  void release();
  std::vector<int> missing() const;  // the ranks that were not heard

 private:
  struct Peer {
    Header header;
    bool told = false, heard = false;
    Part out{0, 0};  // of this rank's send buffer, sent with the header
    size_t in = 0;   // bytes that come with the peer's
    const char* payload = nullptr;
    std::vector<char> whole;  // a payload that lies in two pieces in its pipe
  };
  bool announce();
  Step hear();
  Step hear(int p, Peer& peer);
  Step mismatch(int from);

  const Context& context_;
  const char* send_ = nullptr;
  Header mine_;
  std::vector<Peer> peers_;
};

}  // namespace pncpu
