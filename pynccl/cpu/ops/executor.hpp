// Runs a schedule. Never blocks: a step does what can be done now, and any thread may make the next one.
#pragma once

#include <vector>

#include "ops/matching.hpp"
#include "ops/schedule.hpp"

namespace pncpu {

class Executor {
 public:
  // The matching has told where the peers' buffers are and holds their payloads.
  Executor(const Context& context, Matching& matching) : context_(context), matching_(matching) {}
  void start(const Op& op, const Schedule& schedule);  // which stay until it has ended
  Step step();

 private:
  struct Progress {
    size_t bytes = 0;
    bool ended = false;
  };
  // One operand of a reduction: its current block, fetched here unless it can be read where it is.
  struct Input {
    const char* base = nullptr;  // of all blocks
    const Link* link = nullptr;  // to the peer whose buffer that is
    size_t fetched = 0;
    std::vector<char> block;
  };
  Step run(size_t index);
  Step copy(const Action& action, size_t limit, size_t* done);
  Step reduce(const Action& action, size_t* done);
  Step fetch(const Place& from, Input& input, size_t offset, size_t bytes);
  void locate_inputs(const Action& action);
  bool enter_inputs(const Action& action);
  void leave_inputs(const Action& action, size_t count);
  char* mine(const Place& place) const;
  uint64_t theirs(const Place& place) const;
  bool is_mine(const Place& place) const { return place.kind <= Place::Recv && place.rank == context_.rank; }
  uint64_t stage(const Action& action) const { return matching_.mine().seq << 8 | action.stage; }

  const Context& context_;
  Matching& matching_;
  const Schedule* schedule_ = nullptr;
  const Op* op_ = nullptr;
  size_t item_ = 1;
  size_t first_ = 0;  // all actions before this one have ended
  std::vector<Progress> progress_;
  // For each of the schedule's inputs.
  std::vector<Input> inputs_;
  std::vector<PreMul> scalars_;
  std::vector<const void*> operands_;
};

}  // namespace pncpu
