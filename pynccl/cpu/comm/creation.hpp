// The creation of a communicator, from its handle to its success or failure.
#pragma once

#include "comm/comm.hpp"

namespace pncpu {

// Atomic: another thread may read the handle to abort the creation.
inline void show_handle(ncclComm_t* out, ncclComm_t handle) {
  __atomic_store_n(out, handle, __ATOMIC_RELEASE);
}

// A creation that is dropped, for example by an exception, has failed. So a thread that ends the communicator
// never waits for a creation that does not run.
class Creation {
 public:
  enum class Shows { AtOnce, WhenComplete };  // the handle, in *out
  Creation(std::shared_ptr<Comm> comm, ncclComm_t* out, Shows shows, bool blocking);
  ~Creation() { end(ncclSystemError, "its creation could not be started"); }
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  const std::shared_ptr<Comm>& comm() const { return comm_; }
  // An abort of the parent ends this creation, since it has no handle yet.
  void derives_from(std::shared_ptr<Comm> parent) { parent_ = std::move(parent); }
  // The creating call returns before the creation ends, so the caller keeps the handle even on failure.
  void give_out() { given_out_ = true; }
  // False: the communicator was destroyed or aborted before.
  bool begin();
  // Only the first call has an effect. Peers hear of a failure before this rank's connections end.
  void end(ErrorCode code, std::string_view why, const LateRanks& late = {}) noexcept;

 private:
  const std::shared_ptr<Comm> comm_;
  std::shared_ptr<Comm> parent_;
  ncclComm_t* const out_;
  const Shows shows_;
  const bool blocking_;
  bool given_out_ = false, ended_ = false;
};

}  // namespace pncpu
