// What algorithms write their schedules with.
#pragma once

#include <algorithm>

#include "ops/algorithms.hpp"

namespace pncpu {

// Stages of a rank: it has finished with a peer's buffers; it shows the result of its share.
constexpr uint8_t kDone = 1, kReduced = 2;

inline Place send_of(int rank, size_t offset) { return {Place::Send, rank, offset}; }
inline Place recv_of(int rank, size_t offset) { return {Place::Recv, rank, offset}; }
inline Place payload_of(int rank, size_t offset) { return {Place::Payload, rank, offset}; }
inline Place pipe_of(int peer) { return {Place::Pipe, peer, 0}; }

// One of `shares` equal parts of `count` elements, in whole cache lines; in bytes.
inline Part share_of(size_t count, size_t item, int share, int shares) {
  size_t per = align_up((count + size_t(shares) - 1) / size_t(shares), kCacheLine / item);
  size_t first = std::min(per * size_t(share), count);
  return {first * item, std::min(per, count - first) * item};
}

}  // namespace pncpu
