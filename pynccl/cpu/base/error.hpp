// What an error is.
#pragma once

#include <cstdint>
#include <string>

#include "base/nccl.hpp"

namespace pncpu {

// What ncclInvalidUsage alone does not tell, as pyncclCpuGetErrorKind does.
enum class Mismatch : uint8_t {
  None = pyncclCpuNoMismatch,
  Calls = pyncclCpuCallsDiffer,
  Departed = pyncclCpuRankLeft
};

struct ErrorCode {
  ncclResult_t result;
  Mismatch mismatch;
  bool reported;  // by a peer: the text begins with its rank
  // How many bytes of the text are the function that failed, or the rank in the communicator, at its
  // beginning, as pyncclCpuGetErrorPrefix says.
  uint8_t function = 0, place = 0;
  constexpr ErrorCode(ncclResult_t result_ = ncclSuccess, Mismatch mismatch_ = Mismatch::None,
                      bool reported_ = false)
      : result(result_), mismatch(mismatch_), reported(reported_) {}
  constexpr bool failed() const { return result != ncclSuccess; }
};

// The ranks for which a time-out has waited, as many as its text lists, or one that has died or left.
struct LateRanks {
  static constexpr int kMost = 16;
  int count = 0, ranks[kMost];
  void add(int rank) {
    if (count < kMost) ranks[count++] = rank;
  }
};

struct ErrorReport {
  ErrorCode code;
  std::string text;
  LateRanks late;
};

constexpr ErrorCode kMismatch{ncclInvalidUsage, Mismatch::Calls};
constexpr ErrorCode kDeparted{ncclInvalidUsage, Mismatch::Departed};
constexpr char kFailedEarlier[] = "the communicator failed earlier: ";
constexpr char kMismatchText[] = "the ranks called different things: ";

}  // namespace pncpu
