#include "ops/collectives.hpp"

namespace pncpu {

void Coll::start(const Op& op, uint64_t seq) {
  op_ = op;
  matching_.start(op, seq);
  phase_ = Phase::Matching;
}

Step Coll::step() {
  bool matched = phase_ == Phase::Matching;
  if (matched) {
    Step s = matching_.step();
    if (s != Step::Done) return s;
    plan();
    executor_.start(op_, schedule_);
    phase_ = Phase::Moving;
    underway_.store(true, std::memory_order_relaxed);
  }
  Step s = executor_.step();
  if (s == Step::Done) {
    matching_.release();
    phase_ = Phase::Idle;
    underway_.store(false, std::memory_order_relaxed);
  }
  return matched && s == Step::Blocked ? Step::Moved : s;
}

// Programs repeat their calls: reuse the last schedule if it fits.
void Coll::plan() {
  size_t item = type_size(op_.dtype);
  if (planned_ && call_.func == op_.func && call_.root == op_.root && call_.count == op_.count &&
      call_.item == item)
    return;
  planned_ = false;
  call_ = Call{op_.func,
               op_.root,
               op_.count,
               item,
               context_.rank,
               context_.nranks,
               matching_.mine().is_inline != 0,
               std::move(call_.direct)};
  call_.direct.resize(size_t(context_.nranks));
  for (int p = 0; p < context_.nranks; ++p)
    call_.direct[size_t(p)] = p != context_.rank && context_.link(p).direct();
  schedule_.clear();
  choose_algorithm(call_).plan(call_, &schedule_);
  planned_ = true;
}

std::vector<int> Coll::missing() const {
  return phase_ == Phase::Matching ? matching_.missing() : std::vector<int>();
}

std::string Coll::str() const { return matching_.mine().str() + " #" + std::to_string(seq()); }

}  // namespace pncpu
