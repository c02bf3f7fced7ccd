// Runs a schedule and never blocks: a step makes the progress that is possible now. Any thread may run the
// next step.
#pragma once

#include <memory>
#include <vector>

#include "ops/matching.hpp"
#include "ops/schedule.hpp"

namespace pncpu {

class Executor {
 public:
  // `matching` has the addresses of the peers' buffers and their payloads.
  Executor(const Context& context, Matching& matching) : context_(context), matching_(matching) {}
  // All must live until the end. `near` has the buffers of every rank that are mapped here.
  void start(const Op& op, const Schedule& schedule, const std::vector<Near>& near);
  Step step();

 private:
  struct Progress {
    size_t bytes = 0;
    bool ended = false;
  };
  // One operand of a reduction. Its current block is copied here unless it can be read in place.
  struct Input {
    const char* base = nullptr;  // of all blocks
    const Link* link = nullptr;  // to the owner of the buffer
    size_t fetched = 0;
    std::vector<char> block;
  };
  Step run(size_t index);
  bool is_told(const Action& action) const;
  Step await();
  Step copy(const Action& action, size_t limit, size_t* done);
  Step reduce(const Action& action, size_t limit, size_t* done);
  RedKind operation(Action::Share share) const;
  Step fetch(const Place& from, Input& input, size_t offset, size_t bytes);
  void locate_inputs(const Action& action);
  bool enter_inputs(const Action& action);
  void leave_inputs(const Action& action, size_t count);
  const char* payload(const Place& place) const { return matching_.payload(place.rank) + place.offset; }
  char* mine(const Place& place) const;
  uint64_t theirs(const Place& place) const;
  const char* in_place(const Place& place) const;
  char* mapped(const Place& place) const;  // a peer's buffer here, or nullptr
  bool is_mine(const Place& place) const {
    bool everywhere = place.kind <= Place::Recv || place.kind == Place::Payload;
    return place.kind == Place::Scratch || (everywhere && place.rank == context_.rank);
  }
  uint64_t stage(const Action& action) const { return matching_.mine().seq << 8 | action.stage; }

  const Context& context_;
  Matching& matching_;
  const Schedule* schedule_ = nullptr;
  const std::vector<Near>* near_ = nullptr;
  const Op* op_ = nullptr;
  size_t item_ = 1;
  size_t first_ = 0;  // all actions before this one have ended
  std::vector<Progress> progress_;
  // For each of the schedule's inputs.
  std::vector<Input> inputs_;
  std::vector<PreMul> scalars_;
  std::vector<const void*> operands_;
  std::unique_ptr<char[]> scratch_;
};

}  // namespace pncpu
