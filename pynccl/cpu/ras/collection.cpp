#include "ras/collection.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>

namespace pncpu {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(20);  // after a full backlog
constexpr size_t kPiece = 64 << 10;

size_t most_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return size_t(std::clamp<rlim_t>(limit.rlim_cur / 16, 4, 128));
}

std::string secret_of(Service& service) {
  std::lock_guard<std::recursive_mutex> lock(service.mutex);
  return service.secret;
}

Fd try_connect_tcp(const Endpoint& endpoint) {
  Address at = endpoint.address();
  Fd fd = Fd::made_by([&] { return socket(at.ss.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd || connect(fd.get(), reinterpret_cast<const sockaddr*>(&at.ss), at.len) == 0) return fd;
  int error = errno;
  if (error == EINPROGRESS) return fd;
  fd.reset();
  errno = error;
  return fd;
}

// Nobody else may answer for a process that has ended.
bool is_of_this_user(int fd) {
  ucred who{};
  socklen_t size = sizeof who;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && (who.uid == geteuid() || who.uid == 0);
}

}  // namespace

Collection::Collection(Service& service, Deadline now)
    : began(now), host_(host_id()), secret_(secret_of(service)), most_(most_descriptors()) {
  known_.insert(service.process);
  std::vector<char> mine = service.describe();
  hear(mine.data(), mine.size());
}

void Collection::hear(const char* data, size_t size) {
  RasProcess said;
  if (!read_process(data, size, &said)) return;
  job.heard(said);
  for (const RasProcess::Rank& rank : said.ranks)
    for (const RankPlace& place : rank.places) {
      if (place.presence != Presence::Here || !known_.insert(place.process).second) continue;
      questions_.emplace_back();
      questions_.back().to = place;
    }
}

void Collection::tick(Deadline now) {
  for (auto q = questions_.begin(); q != questions_.end() && open_ < most_;) {
    auto at = q++;
    if (at->stage != Stage::Waits || at->retry > now) continue;
    Outcome outcome = begin(*at, now);
    if (at->fd) ++open_;
    settle(at, outcome);
  }
}

Deadline Collection::next(Deadline now) {
  for (const Question& q : questions_)
    if (q.stage == Stage::Waits) return now + kRetry;
  return kForever;
}

void Collection::poll_for(std::vector<pollfd>* entries) const {
  for (const Question& q : questions_)
    if (q.fd) entries->push_back({q.fd.get(), short(q.stage == Stage::Connects ? POLLOUT : POLLIN), 0});
}

void Collection::proceed(const pollfd& entry) {
  auto q = std::find_if(questions_.begin(), questions_.end(),
                        [&](const Question& one) { return one.fd && one.fd.get() == entry.fd; });
  if (q != questions_.end() && entry.revents) settle(q, step(*q));
}

void Collection::settle(std::list<Question>::iterator q, Outcome outcome) {
  if (outcome == Outcome::Goes) return;
  if (outcome == Outcome::Refused) job.refused(q->to.process);
  if (q->fd) --open_;
  questions_.erase(q);
}

Collection::Outcome Collection::begin(Question& q, Deadline now) {
  bool local = q.to.host == host_;
  q.fd = local ? try_connect_unix(q.to.unix_name) : try_connect_tcp(q.to.endpoint);
  if (!q.fd) {
    q.retry = now + kRetry;
    bool later = errno == EAGAIN || errno == EINTR || out_of_descriptors(errno);
    return later ? Outcome::Goes : errno == ECONNREFUSED ? Outcome::Refused : Outcome::Ended;
  }
  if (local && !is_of_this_user(q.fd.get())) return Outcome::Refused;
  q.stage = Stage::Connects;
  return local ? greet(q) : Outcome::Goes;
}

Collection::Outcome Collection::greet(Question& q) {
  q.hello.token = q.to.process;
  q.hello.kind = HelloKind::Ask;
  q.hello.nonce = Token::random();
  q.hello.secured = !secret_.empty();
  // A new socket has room for it.
  if (send(q.fd.get(), &q.hello, sizeof q.hello, MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t(sizeof q.hello))
    return Outcome::Ended;
  q.stage = secret_.empty() ? Stage::Answers : Stage::Proves;
  q.wanted = secret_.empty() ? sizeof(CtlHeader) : sizeof(Challenge);
  return Outcome::Goes;
}

Collection::Outcome Collection::step(Question& q) {
  if (q.stage != Stage::Connects) return read(q);
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(q.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return Outcome::Ended;
  if (error) return error == ECONNREFUSED ? Outcome::Refused : Outcome::Ended;
  return greet(q);
}

// The buffer grows as the answer arrives, whatever length the header claims.
Collection::Outcome Collection::read(Question& q) {
  for (;;) {
    size_t have = q.got.size(), piece = std::min(q.wanted - have, std::max(kPiece, have));
    q.got.resize(have + piece);
    ssize_t n = recv(q.fd.get(), q.got.data() + have, piece, MSG_DONTWAIT);
    q.got.resize(have + size_t(std::max<ssize_t>(n, 0)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return Outcome::Goes;
    if (n <= 0) return Outcome::Ended;
    if (q.got.size() < q.wanted) continue;
    if (Outcome outcome = advance(q); outcome != Outcome::Goes) return outcome;
  }
}

// All that was wanted has arrived.
Collection::Outcome Collection::advance(Question& q) {
  if (q.stage == Stage::Proves) {
    Challenge challenge;
    memcpy(static_cast<void*>(&challenge), q.got.data(), sizeof challenge);
    Digest expected = proof(secret_, Role::Listens, q.hello, challenge.nonce);
    if (!challenge.secured ||
        !equal_in_constant_time(expected.data(), challenge.proof.data(), expected.size()))
      return Outcome::Ended;
    Digest mine = proof(secret_, Role::Connects, q.hello, challenge.nonce);
    if (send(q.fd.get(), mine.data(), mine.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t(mine.size()))
      return Outcome::Ended;
    q.stage = Stage::Answers;
    q.got.clear();
    q.wanted = sizeof(CtlHeader);
    return Outcome::Goes;
  }
  CtlHeader header;
  memcpy(&header, q.got.data(), sizeof header);
  if (header.kind != Ctl::State || header.bytes > kMaxFrame) return Outcome::Ended;
  size_t whole = sizeof header + header.bytes;
  if (q.got.size() < whole) return q.wanted = whole, Outcome::Goes;
  hear(q.got.data() + sizeof header, header.bytes);
  return Outcome::Ended;
}

}  // namespace pncpu
