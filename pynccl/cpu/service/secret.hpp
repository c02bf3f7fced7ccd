// The secret of a job, and its proof by HMAC-SHA-256 (RFC 2104, FIPS 180-4). The secret itself is never sent.
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

// The time does not depend on where the two differ.
bool equal_in_constant_time(const void* a, const void* b, size_t bytes);

// The value of PYNCCL_SECRET, else the contents of the file PYNCCL_SECRET_FILE, as for the Python store; "":
// neither is set. ncclInvalidArgument for a file that cannot be read, is empty, or is open to every user.
ncclResult_t read_secret(std::string* secret);

}  // namespace pncpu
