// The actions of one rank in a collective: plain data that an algorithm writes and the executor runs. It
// names buffers, not addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pncpu {

// The source or target of bytes.
struct Place {
  enum Kind : uint8_t {
    Send,  // a send or receive buffer of this rank, or of a peer that Call::direct names
    Recv,
    Pipe,     // the pipe from or to a peer, used in the order of the actions
    Payload,  // the data that came with a peer's header, or all that this rank shows
    Scratch   // this rank's memory for the schedule, of Schedule::scratch bytes
  };
  Kind kind = Send;
  int32_t rank = 0;
  size_t offset = 0;  // in bytes; unused for a pipe
};

// Actions run concurrently, block by block, within the limits of `after` and `follows`.
struct Action {
  enum Kind : uint8_t {
    Copy,    // `bytes` from `from` to `to`
    Reduce,  // `bytes` of each input, in their order, to `to`
    Notify,  // tells the peer `to.rank` that this rank has reached `stage`
    Wait     // waits for the same from the peer `from.rank`
  };
  // A reduction of all inputs, or one in two steps: of the inputs of each host, and then of what these gave.
  enum Share : uint8_t { Whole, Partial, Last };
  static constexpr int32_t kNone = -1;
  Kind kind = Copy;
  Share share = Whole;
  uint8_t stage = 0;
  Place from, to;
  size_t bytes = 0;
  uint32_t first_input = 0, inputs = 0;
  int32_t after = kNone;  // an action that must end before this one begins
  int32_t follows =
      kNone;  // an action over the same number of bytes; this one uses the bytes it has finished
};

struct Schedule {
  std::vector<Action> actions;
  std::vector<Place> inputs;
  size_t scratch = 0;

  void clear() {
    actions.clear();
    inputs.clear();
    scratch = 0;
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
  // Uses the inputs that were added since the last reduce.
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
