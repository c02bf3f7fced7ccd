#include "ops/executor.hpp"

#include <algorithm>

#include "ops/moves.hpp"

namespace pncpu {

void Executor::start(const Op& op, const Schedule& schedule, const std::vector<Near>& near) {
  op_ = &op;
  item_ = type_size(op.dtype);
  schedule_ = &schedule;
  near_ = &near;
  first_ = 0;
  progress_.assign(schedule.actions.size(), Progress());
  size_t inputs = schedule.inputs.size();
  if (inputs_.size() < inputs) inputs_.resize(inputs);
  scalars_.resize(inputs);
  operands_.resize(inputs);
  for (size_t i = 0; i < inputs; ++i) {
    inputs_[i].base = nullptr;
    inputs_[i].link = nullptr;
    inputs_[i].fetched = 0;
    scalars_[i] = matching_.header(schedule.inputs[i].rank).scalar;
  }
  scratch_.reset(schedule.scratch ? new char[schedule.scratch] : nullptr);
}

Step Executor::step() {
  size_t actions = progress_.size(), rounds_left = std::max<size_t>(1, kSlice / context_.block_bytes);
  bool moved = false;
  for (;;) {
    bool any = false;
    for (size_t i = first_; i < actions; ++i) {
      if (progress_[i].ended) continue;
      Step s = run(i);
      if (s == Step::Failed) return s;
      progress_[i].ended = s == Step::Done;
      any = any || s != Step::Blocked;
    }
    while (first_ < actions && progress_[first_].ended) ++first_;
    if (first_ == actions) {
      scratch_.reset();
      return Step::Done;
    }
    moved = moved || any;
    if (any && --rounds_left) {
      context_.ring_peers();
      continue;
    }
    return moved ? Step::Moved : await();
  }
}

Step Executor::run(size_t index) {
  const Action& a = schedule_->actions[index];
  if (a.after != Action::kNone && !progress_[size_t(a.after)].ended) return Step::Blocked;
  size_t limit = a.follows == Action::kNone ? a.bytes : progress_[size_t(a.follows)].bytes;
  size_t* done = &progress_[index].bytes;
  switch (a.kind) {
    case Action::Copy: {
      if (*done == limit && limit < a.bytes) return Step::Blocked;
      Step s = copy(a, limit, done);
      return s == Step::Done && limit < a.bytes ? Step::Moved : s;
    }
    case Action::Reduce:
      return reduce(a, limit, done);
    case Action::Notify:
      context_.link(a.to.rank).tell(stage(a));
      return Step::Done;
    case Action::Wait:
      break;
  }
  return is_told(a) ? Step::Done : Step::Blocked;
}

bool Executor::is_told(const Action& a) const {
  return context_.link(a.from.rank).theirs->stage.load(std::memory_order_acquire) >= stage(a);
}

// Nothing more can be done now: says after how many stages of the peers the bell must ring.
Step Executor::await() {
  int32_t stages = 0;
  bool others = false;
  auto each_stage = [&](auto&& visit) {
    for (size_t i = first_; i < progress_.size(); ++i) {
      const Action& a = schedule_->actions[i];
      if (progress_[i].ended || (a.after != Action::kNone && !progress_[size_t(a.after)].ended)) continue;
      if (a.kind == Action::Wait)
        visit(a);
      else
        others = true;
    }
  };
  each_stage([&](const Action&) { ++stages; });
  if (context_.cell) context_.cell->awaited.exchange(others ? 0 : stages, std::memory_order_seq_cst);
  // A peer tells its stage before it counts it. A stage that was counted before is seen here.
  bool told = false;
  each_stage([&](const Action& a) { told = told || is_told(a); });
  return told ? Step::Moved : context_.blocked(kColl);
}

Step Executor::copy(const Action& a, size_t limit, size_t* done) {
  const char* doing = func_name(op_->func);
  if (a.to.kind == Place::Pipe)
    return pipe_out(*context_.link(a.to.rank).pipe[kColl], mine(a.from), limit, done);
  if (a.from.kind == Place::Pipe)
    return pipe_in(*context_.link(a.from.rank).pipe[kColl], mine(a.to), limit, done);
  if (!is_mine(a.to)) {
    if (char* to = mapped(a.to)) return mapped_out(context_, a.to.rank, mine(a.from), to, limit, done);
    return direct_out(context_, a.to.rank, mine(a.from), theirs(a.to), limit, done, doing);
  }
  if (!is_mine(a.from) && a.from.kind != Place::Payload) {
    if (char* from = mapped(a.from)) return mapped_in(context_, a.from.rank, from, mine(a.to), limit, done);
    // One proof of identity is enough: a peer that dies later never notifies that it is done.
    return direct_in(context_, a.from.rank, theirs(a.from), mine(a.to), limit, done, *done == 0, doing);
  }
  const char* from = a.from.kind == Place::Payload ? payload(a.from) : mine(a.from);
  size_t n = from == mine(a.to) ? limit - *done : std::min(limit - *done, kSlice);
  if (from != mine(a.to)) memmove(mine(a.to) + *done, from + *done, n);
  *done += n;
  return *done == limit ? Step::Done : Step::Moved;
}

Step Executor::reduce(const Action& a, size_t limit, size_t* done) {
  if (*done == 0) locate_inputs(a);
  size_t bytes = std::min(context_.block_bytes, a.bytes - *done);
  if (limit < *done + bytes) return Step::Blocked;
  bool ready = true, moved = false;
  for (size_t i = a.first_input; i < a.first_input + a.inputs; ++i) {
    Input& input = inputs_[i];
    if (input.base) {
      operands_[i] = input.base + *done;
      continue;
    }
    Step s = fetch(schedule_->inputs[i], input, *done, bytes);
    if (s == Step::Failed) return s;
    ready = ready && s == Step::Done;
    moved = moved || s == Step::Moved;
    operands_[i] = input.block.data();
  }
  if (!ready) return moved ? Step::Moved : Step::Blocked;
  if (!enter_inputs(a)) return Step::Blocked;
  pncpu::reduce(mine(a.to) + *done, &operands_[a.first_input], int(a.inputs), bytes / item_, op_->dtype,
                operation(a.share), context_.nranks, &scalars_[a.first_input]);
  leave_inputs(a, a.inputs);
  *done += bytes;
  for (size_t i = a.first_input; i < a.first_input + a.inputs; ++i) inputs_[i].fetched = 0;
  return *done == a.bytes ? Step::Done : Step::Moved;
}

// The operation on this share: factors apply to the ranks' inputs, and an integer average divides the sum of
// all of them.
RedKind Executor::operation(Action::Share share) const {
  bool divides = op_->red == RedKind::Avg && is_integer(op_->dtype);
  if (share == Action::Whole) return op_->red;
  if (share == Action::Partial) return divides ? RedKind::Sum : op_->red;
  bool scaled = op_->red == RedKind::PreMulSum || (op_->red == RedKind::Avg && !divides);
  return scaled ? RedKind::Sum : op_->red;
}

// Finds the inputs that can be read in place.
void Executor::locate_inputs(const Action& a) {
  for (size_t i = a.first_input; i < a.first_input + a.inputs; ++i) {
    const Place& from = schedule_->inputs[i];
    Input& input = inputs_[i];
    if (from.kind == Place::Payload)
      input.base = payload(from);
    else if (is_mine(from))
      input.base = mine(from);
    else if (from.kind != Place::Pipe && (input.base = in_place(from)))
      input.link = &context_.link(from.rank);
    if (!input.base && input.block.size() < context_.block_bytes) input.block.resize(context_.block_bytes);
  }
}

// A peer's buffer that plain loads reach, or nullptr.
const char* Executor::in_place(const Place& place) const {
  if (const char* here = mapped(place)) return here;
  return context_.link(place.rank).memory->at(theirs(place));
}

// Whether all peers still allow this rank to read their buffers. A peer that does not has failed, and its
// error will arrive.
bool Executor::enter_inputs(const Action& a) {
  for (size_t i = 0; i < a.inputs; ++i) {
    const Link* link = inputs_[a.first_input + i].link;
    if (!link || link->enter()) continue;
    leave_inputs(a, i);
    return false;
  }
  return true;
}

void Executor::leave_inputs(const Action& a, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (const Link* link = inputs_[a.first_input + i].link) link->leave();
}

// Copies one block of an input here. Moved: a part of it has arrived.
Step Executor::fetch(const Place& from, Input& input, size_t offset, size_t bytes) {
  if (input.fetched == bytes) return Step::Done;
  if (from.kind == Place::Pipe)
    return pipe_in(*context_.link(from.rank).pipe[kColl], input.block.data(), bytes, &input.fetched);
  return direct_in(context_, from.rank, theirs(from) + offset, input.block.data(), bytes, &input.fetched,
                   offset == 0, func_name(op_->func));
}

char* Executor::mine(const Place& place) const {
  if (place.kind == Place::Scratch) return scratch_.get() + place.offset;
  // This rank's part of the board is its own.
  if (place.kind == Place::Payload) return const_cast<char*>(payload(place));
  void* base = place.kind == Place::Send ? const_cast<void*>(op_->send) : op_->recv;
  return static_cast<char*>(base) + place.offset;
}

uint64_t Executor::theirs(const Place& place) const {
  const Header& header = matching_.header(place.rank);
  return (place.kind == Place::Send ? header.send : header.recv) + place.offset;
}

char* Executor::mapped(const Place& place) const {
  const Near& near = (*near_)[size_t(place.rank)];
  char* base = place.kind == Place::Send ? near.send : near.recv;
  return base ? base + place.offset : nullptr;
}

}  // namespace pncpu
