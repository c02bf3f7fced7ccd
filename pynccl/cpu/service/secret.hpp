// The secret that the ranks of a job may share, and how one side proves to the other that it has it: with
// HMAC-SHA-256 (RFC 2104, FIPS 180-4). The secret itself never travels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/nccl.hpp"

namespace pncpu {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const void* data, size_t bytes);
Digest hmac_sha256(const std::string& key, const void* data, size_t bytes);

// Takes the same time wherever the two differ.
bool equal_in_constant_time(const void* a, const void* b, size_t bytes);

// What PYNCCL_SECRET is or the file PYNCCL_SECRET_FILE holds, as for the Python store; "" where neither is
// set. ncclInvalidArgument for a file that cannot be read, is empty, or is open to every user.
ncclResult_t read_secret(std::string* secret);

}  // namespace pncpu
