// The creation of a communicator, from its handle to its success or failure.
#pragma once

#include "comm/comm.hpp"

namespace pncpu {

// Another thread may look at it, to abort what the caller waits in.
inline void show_handle(ncclComm_t* out, ncclComm_t handle) {
  __atomic_store_n(out, handle, __ATOMIC_RELEASE);
}

// Whatever is thrown, a creation that is dropped has failed: whoever ends the communicator never waits for
// what nobody will do.
class Creation {
 public:
  enum class Shows { AtOnce, WhenComplete };  // the handle, in *out
  Creation(std::shared_ptr<Comm> comm, ncclComm_t* out, Shows shows, bool blocking);
  ~Creation() { end(ncclSystemError, "its creation could not be started"); }
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  const std::shared_ptr<Comm>& comm() const { return comm_; }
  // An abort of the parent ends it, which has no handle yet.
  void derives_from(std::shared_ptr<Comm> parent) { parent_ = std::move(parent); }
  // The call that made it returns before its end, so that the handle stays the caller's even if it fails.
  void give_out() { given_out_ = true; }
  // False where the communicator was destroyed or aborted before.
  bool begin();
  // Of several ends the first counts. Peers hear of a failure before this rank's connections end.
  void end(ErrorCode code, std::string_view why) noexcept;

 private:
  const std::shared_ptr<Comm> comm_;
  std::shared_ptr<Comm> parent_;
  ncclComm_t* const out_;
  const Shows shows_;
  const bool blocking_;
  bool given_out_ = false, ended_ = false;
};

}  // namespace pncpu
