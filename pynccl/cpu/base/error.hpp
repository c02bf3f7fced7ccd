// What an error is, beside its text.
#pragma once

#include "base/nccl.hpp"

namespace pncpu {

struct ErrorCode {
  ncclResult_t result;
  bool mismatch;  // the ranks called different things, which ncclInvalidUsage alone does not tell
  bool reported;  // by a peer: the text begins with its rank
  constexpr ErrorCode(ncclResult_t result_ = ncclSuccess, bool mismatch_ = false, bool reported_ = false)
      : result(result_), mismatch(mismatch_), reported(reported_) {}
  constexpr bool failed() const { return result != ncclSuccess; }
};

constexpr ErrorCode kMismatch{ncclInvalidUsage, true};
constexpr char kFailedEarlier[] = "the communicator failed earlier: ";
constexpr char kMismatchText[] = "the ranks called different things: ";

}  // namespace pncpu
