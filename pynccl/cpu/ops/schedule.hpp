// What one rank does in a collective once all have agreed on it: plain data, made by an algorithm, run by the
// executor. It names buffers, not addresses.
#pragma once

#include <cstdint>
#include <vector>

namespace pncpu {

// Where bytes come from or go to.
struct Place {
  enum Kind : uint8_t {
    Send,  // a send or receive buffer: this rank's, or that of a peer with direct access
    Recv,
    Pipe,    // the pipe from or to a peer, in the order in which the actions stand in the schedule
    Payload  // what came with a peer's header
  };
  Kind kind = Send;
  int32_t rank = 0;
  size_t offset = 0;  // bytes; means nothing in a pipe
};

// Actions run side by side, block by block, as far as `after` and `follows` allow.
struct Action {
  enum Kind : uint8_t {
    Copy,    // `bytes` from `from` to `to`
    Reduce,  // `bytes` of each input, in their order, to `to`
    Notify,  // tells the peer `to.rank` that this rank has come to `stage`
    Wait     // until the peer `from.rank` has told the same
  };
  static constexpr int32_t kNone = -1;
  Kind kind = Copy;
  uint8_t stage = 0;
  Place from, to;
  size_t bytes = 0;
  uint32_t first_input = 0, inputs = 0;
  int32_t after = kNone;    // an action that has to end before this one begins
  int32_t follows = kNone;  // an action over as many bytes; this one moves what that one has finished
};

struct Schedule {
  std::vector<Action> actions;
  std::vector<Place> inputs;

  void clear() {
    actions.clear();
    inputs.clear();
  }
  // Each returns the action's index, for `after` and `follows`.
  int32_t add(const Action& action) {
    actions.push_back(action);
    return int32_t(actions.size()) - 1;
  }
  int32_t copy(Place from, Place to, size_t bytes) {
    Action a;
    a.from = from;
    a.to = to;
    a.bytes = bytes;
    return add(a);
  }
  // Takes the inputs that were added since the last one.
  int32_t reduce(Place to, size_t bytes) {
    Action a;
    a.kind = Action::Reduce;
    a.to = to;
    a.bytes = bytes;
    for (const Action& before : actions) a.first_input += before.inputs;
    a.inputs = uint32_t(inputs.size()) - a.first_input;
    return add(a);
  }
  int32_t notify(int peer, uint8_t stage, int32_t after) {
    Action a;
    a.kind = Action::Notify;
    a.stage = stage;
    a.to.rank = peer;
    a.after = after;
    return add(a);
  }
  int32_t wait(int peer, uint8_t stage) {
    Action a;
    a.kind = Action::Wait;
    a.stage = stage;
    a.from.rank = peer;
    return add(a);
  }
};

}  // namespace pncpu
