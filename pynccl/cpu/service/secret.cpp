#include "service/secret.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.hpp"
#include "base/net.hpp"
#include "base/params.hpp"

namespace pncpu {
namespace {

constexpr size_t kBlock = 64;
constexpr size_t kMostSecret = size_t(1) << 16;
constexpr size_t kLeastSecret = 16;  // as for the Python store

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

class Sha256 {
 public:
  void add(const void* data, size_t bytes) {
    const uint8_t* at = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) {
      block_[length_++ % kBlock] = at[i];
      if (length_ % kBlock == 0) compress();
    }
  }
  Digest end() {
    uint64_t bits = length_ * 8;
    uint8_t pad = 0x80;
    do add(&pad, 1), pad = 0;
    while (length_ % kBlock != kBlock - 8);
    for (int shift = 56; shift >= 0; shift -= 8) {
      uint8_t byte = uint8_t(bits >> shift);
      add(&byte, 1);
    }
    Digest out;
    for (size_t i = 0; i < out.size(); ++i) out[i] = uint8_t(state_[i / 4] >> (24 - 8 * (i % 4)));
    return out;
  }

 private:
  void compress() {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i)
      w[i] = uint32_t(block_[4 * i]) << 24 | uint32_t(block_[4 * i + 1]) << 16 |
             uint32_t(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    for (size_t i = 16; i < 64; ++i) {
      uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
      uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    memcpy(v, state_, sizeof v);
    for (size_t i = 0; i < 64; ++i) {
      uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
      uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
      uint32_t t1 = v[7] + s1 + choice + kRounds[i] + w[i];
      uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
      uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      memmove(v + 1, v, 7 * sizeof *v);
      v[4] += t1;
      v[0] = t1 + s0 + majority;
    }
    for (size_t i = 0; i < 8; ++i) state_[i] += v[i];
  }

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[kBlock];
  uint64_t length_ = 0;
};

// The file's bytes without the white space around them, as Python's store reads it.
ncclResult_t read_file(const char* path, std::string* secret) {
  Fd fd(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat st;
  std::string text(kMostSecret, '\0');
  ssize_t n = fd && fstat(fd.get(), &st) == 0 ? read(fd.get(), &text[0], text.size()) : -1;
  if (n < 0)
    return fail(ncclInvalidArgument, "PYNCCL_SECRET_FILE: cannot read '%s': %s", path, strerror(errno));
  if (!S_ISREG(st.st_mode))
    return fail(ncclInvalidArgument,
                "PYNCCL_SECRET_FILE: '%s' is not a regular file; expected a file with the secret", path);
  if (st.st_mode & S_IRWXO)
    return fail(ncclInvalidArgument,
                "PYNCCL_SECRET_FILE: '%s' is open to every user (mode %04o); expected 0600", path,
                unsigned(st.st_mode) & 07777);
  text.resize(size_t(n));
  constexpr char kSpace[] = " \t\n\r\f\v\x1c\x1d\x1e\x1f";  // as Python's str.strip
  size_t first = text.find_first_not_of(kSpace), last = text.find_last_not_of(kSpace);
  if (first == std::string::npos)
    return fail(ncclInvalidArgument, "PYNCCL_SECRET_FILE: '%s' is empty; expected the secret", path);
  *secret = text.substr(first, last - first + 1);
  return ncclSuccess;
}

ncclResult_t check_length(const char* name, const std::string& secret) {
  if (secret.size() >= kLeastSecret) return ncclSuccess;
  return fail(ncclInvalidArgument,
              "%s has %zu bytes; expected at least %zu, because a peer of one connection can try short ones "
              "offline. This makes a good one: "
              "python -c \"import secrets; print(secrets.token_urlsafe(24))\"",
              name, secret.size(), kLeastSecret);
}

}  // namespace

Digest sha256(const void* data, size_t bytes) {
  Sha256 hash;
  hash.add(data, bytes);
  return hash.end();
}

Digest hmac_sha256(const std::string& key, const void* data, size_t bytes) {
  uint8_t block[kBlock] = {};
  if (key.size() > kBlock) {
    Digest shorter = sha256(key.data(), key.size());
    memcpy(block, shorter.data(), shorter.size());
  } else {
    memcpy(block, key.data(), key.size());
  }
  Sha256 inner, outer;
  for (uint8_t& b : block) b ^= 0x36;
  inner.add(block, sizeof block);
  inner.add(data, bytes);
  Digest middle = inner.end();
  for (uint8_t& b : block) b ^= 0x36 ^ 0x5c;
  outer.add(block, sizeof block);
  outer.add(middle.data(), middle.size());
  return outer.end();
}

bool equal_in_constant_time(const void* a, const void* b, size_t bytes) {
  volatile uint8_t different = 0;
  for (size_t i = 0; i < bytes; ++i)
    different = uint8_t(different | (static_cast<const uint8_t*>(a)[i] ^ static_cast<const uint8_t*>(b)[i]));
  return different == 0;
}

ncclResult_t read_secret(std::string* secret) {
  const char* text = param_str("PYNCCL_SECRET");
  const char* path = param_str("PYNCCL_SECRET_FILE");
  *secret = text ? text : "";
  if (!secret->empty()) return check_length("PYNCCL_SECRET", *secret);
  if (!path || !*path) return ncclSuccess;
  if (ncclResult_t r = read_file(path, secret); r != ncclSuccess) return r;
  return check_length("PYNCCL_SECRET_FILE: the secret", *secret);
}

}  // namespace pncpu
