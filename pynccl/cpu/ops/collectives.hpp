// The collectives, as a state machine that never blocks: announce the call to every rank, hear theirs and
// compare, then move the data, then wait until nobody reads this rank's buffers any more.
#pragma once

#include <vector>

#include "ops/ops.hpp"
#include "transport/transport.hpp"

namespace pncpu {

class Coll {
 public:
  explicit Coll(Comm& comm) : comm_(comm) {}
  void start(const Op& op, uint64_t seq);
  Step step();
  // Ranks that have not come to this collective yet; those that have not let go of this rank's buffers.
  std::vector<int> missing() const;
  std::string str() const;
  uint64_t seq() const { return mine_.seq; }
  // The peers are at work on this collective, so what is waited for comes soon.
  bool underway() const { return running_ && state_ != State::Announce; }

 private:
  struct Part {
    const char* from = nullptr;  // here (out) or at the peer (in)
    char* to = nullptr;
    size_t bytes = 0, done = 0;
  };
  struct Link {
    Header header;
    bool told = false, heard = false;
    const char* payload = nullptr;
    size_t block_filled = 0;  // bytes of the current block that have arrived by pipe
    Part raw_out;             // this rank's input for the peer's reduction
    Part out, in;  // data or results that move as they are; results move by direct writes where they can
    std::vector<char> scratch;
  };
  Step run_alone();
  bool announce();
  Step hear();
  Step mismatch(int from);
  Span payload_for(int peer) const;
  Step finish_inline();
  void plan();
  void plan_copies();
  void plan_reduction();
  Step move();
  Step push(int peer);
  Step reduce_blocks();
  Step gather_block(int peer, size_t offset, size_t bytes, const void** input);
  Step pull(int peer);
  Step pull_direct(int peer);
  Step pass_on(size_t first, size_t count);
  Step depart();
  bool reads_directly(int peer, bool of_mine) const;
  void reduce_into(void* out, const void* const* inputs, size_t count);
  void segment_of(int rank, size_t* first, size_t* count) const;

  enum class State { Announce, Inline, Move, Depart };
  Comm& comm_;
  Op op_;
  Header mine_;
  State state_ = State::Announce;
  bool running_ = false;
  std::vector<Link> links_;
  std::vector<PreMul> scalars_;
  // This rank's share of a reduction: elements [first, first + count) of everyone's input.
  size_t share_first_ = 0, share_count_ = 0, share_done_ = 0, block_count_ = 0;
  char* share_to_ = nullptr;
  bool passes_results_on_ = false;  // an all_reduce whose ranks each reduce a share for all
};

}  // namespace pncpu
