#include "service/admission.hpp"

#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>

namespace pncpu {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMost = 64, kMostOfOneSource = 16;
constexpr milliseconds kLocalLimit{1000}, kRemoteLimit{5000};
constexpr milliseconds kLocalGrace{50}, kRemoteGrace{200};
constexpr milliseconds kRest{100};  // without a descriptor
constexpr double kStrangersPerSecond = 2000, kMostCredit = 200;
constexpr int kReserve = 32;  // descriptors that are kept for the program

uint64_t mix(const void* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
  return hash;
}

}  // namespace

// A host may have a whole /64 of IPv6 addresses, so a source is a /64.
Admission::Source Admission::Source::of(const Address& address) {
  if (address.ss.ss_family == AF_INET) {
    auto* in = reinterpret_cast<const sockaddr_in*>(&address.ss);
    return {mix(&in->sin_addr, 4), (ntohl(in->sin_addr.s_addr) >> 24) == 127};
  }
  auto* in = reinterpret_cast<const sockaddr_in6*>(&address.ss);
  return {mix(&in->sin6_addr, 8), bool(IN6_IS_ADDR_LOOPBACK(&in->sin6_addr))};
}

Admission::Admission() : credit_(kMostCredit), credit_at_(Clock::now()) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  cap_ = size_t(std::clamp<rlim_t>(limit.rlim_cur / 16, 4, kMost));
  scarce_from_ = int(std::min<rlim_t>(limit.rlim_cur, INT32_MAX)) - kReserve;
}

Deadline Admission::Guest::grace() const { return since + (source.local ? kLocalGrace : kRemoteGrace); }
Deadline Admission::Guest::limit() const { return since + (source.local ? kLocalLimit : kRemoteLimit); }

void Admission::came(int fd, const Source& source, Deadline now) {
  guests_.push_back({fd, source, now});
  scarce_ = fd >= scarce_from_;  // the kernel assigns the lowest free number
  starved_since_ = Deadline::max();
}

void Admission::proved(int fd) {
  guests_.erase(std::remove_if(guests_.begin(), guests_.end(), [&](const Guest& g) { return g.fd == fd; }),
                guests_.end());
}

void Admission::went(int fd, Deadline now) {
  size_t before = guests_.size();
  proved(fd);
  if (guests_.size() == before) return;
  credit_ = credit(now) - 1;
  credit_at_ = now;
}

void Admission::starved(Deadline now) {
  rests_until_ = now + kRest;
  starved_since_ = std::min(starved_since_, now);
}

double Admission::credit(Deadline now) const {
  double seconds = std::chrono::duration<double>(now - credit_at_).count();
  return std::min(kMostCredit, credit_ + seconds * kStrangersPerSecond);
}

// If there are too many connections, the oldest one of the source that has most.
const Admission::Guest* Admission::beyond_caps() const {
  const Guest* heaviest = nullptr;
  size_t most = 0;
  for (const Guest& g : guests_) {
    size_t n = size_t(std::count_if(guests_.begin(), guests_.end(), [&](const Guest& other) {
      return other.source.id == g.source.id && other.source.local == g.source.local;
    }));
    if (n > most) heaviest = &g, most = n;
  }
  bool too_many = most > kMostOfOneSource || guests_.size() > (scarce_ ? 1 : cap_);
  return too_many ? heaviest : nullptr;
}

int Admission::overdue(Deadline now) const {
  for (const Guest& g : guests_)
    if (g.limit() <= now) return g.fd;
  const Guest* g = beyond_caps();
  return g && g->grace() <= now ? g->fd : -1;
}

bool Admission::accepts(Deadline now) const {
  return now >= rests_until_ && credit(now) >= 1 && !beyond_caps();
}

Deadline Admission::next_change(Deadline now) const {
  Deadline next = Deadline::max();
  for (const Guest& g : guests_) next = std::min(next, g.limit());
  if (const Guest* g = beyond_caps()) next = std::min(next, g->grace());
  if (now < rests_until_) next = std::min(next, rests_until_);
  double missing = 1 - credit(now);
  if (missing > 0)
    next =
        std::min(next, now + std::chrono::microseconds(1000 + int64_t(missing * 1e6 / kStrangersPerSecond)));
  return next;
}

}  // namespace pncpu
