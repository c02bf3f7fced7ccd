#include "comm/creation.hpp"

#include <algorithm>
#include <utility>

namespace pncpu {

Creation::Creation(std::shared_ptr<Comm> comm, ncclComm_t* out, Shows shows, bool blocking)
    : comm_(std::move(comm)), out_(out), shows_(shows), blocking_(blocking) {
  comm_->handle = static_cast<ncclComm_t>(handles<Comm>().add(comm_));
  if (shows_ == Shows::AtOnce) show_handle(out_, comm_->handle);
}

// The caller of a blocking creation waits for its end and gets no handle if it fails.
bool Creation::begin() {
  given_out_ = !blocking_;
  if (!comm_->comm_state.begin_creation()) return false;
  if (parent_) parent_->begin_child(comm_);
  return true;
}

void Creation::end(ErrorCode code, std::string_view why, const LateRanks& late) noexcept {
  if (std::exchange(ended_, true)) return;
  if (parent_) parent_->end_child(*comm_, code, why, late);
  if (!code.failed()) {
    if (shows_ == Shows::WhenComplete) show_handle(out_, comm_->handle);
    return;
  }
  // The communicator's report has this rank already.
  why.remove_prefix(std::min(why.size(), size_t(code.function) + code.place));
  code.function = code.place = 0;
  comm_->give_up(code, why, late);
  comm_->session.stop();
  comm_->session.disconnect();
  comm_->comm_state.set_pending(code.result);
  bool callers = shows_ == Shows::AtOnce && given_out_;
  if (!callers) handles<Comm>().take(comm_->handle);
  if (!callers && shows_ == Shows::AtOnce) show_handle(out_, nullptr);
}

}  // namespace pncpu
