#include "base/net.hpp"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <strings.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "base/params.hpp"

namespace pncpu {
namespace {

constexpr int kBacklog = 16384;  // the kernel lowers it to net.core.somaxconn
constexpr std::chrono::milliseconds kFirstBackoff{1}, kLongestBackoff{50};
constexpr std::chrono::milliseconds kStopPeriod{50};  // how often a wait checks for a stop

bool explain(std::string* why, const std::string& text) {
  if (why != nullptr) *why = text;
  return false;
}

std::string error_text(const std::string& what, int error) { return what + " : " + describe_error(error); }

sockaddr_in* ipv4(sockaddr_storage* ss) { return reinterpret_cast<sockaddr_in*>(ss); }
sockaddr_in6* ipv6(sockaddr_storage* ss) { return reinterpret_cast<sockaddr_in6*>(ss); }
const sockaddr_in* ipv4(const sockaddr_storage* ss) { return reinterpret_cast<const sockaddr_in*>(ss); }
const sockaddr_in6* ipv6(const sockaddr_storage* ss) { return reinterpret_cast<const sockaddr_in6*>(ss); }
sockaddr* any(Address* addr) { return reinterpret_cast<sockaddr*>(&addr->ss); }
const sockaddr* any(const Address& addr) { return reinterpret_cast<const sockaddr*>(&addr.ss); }

void assign(Address* out, const sockaddr* sa, socklen_t len) {
  *out = Address{};
  memcpy(&out->ss, sa, len);
  out->len = len;
}

socklen_t length_of(int family) { return family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6); }

// ---- parsing

bool parse_port(const std::string& text, int* port) {
  bool digits =
      !text.empty() && text.size() <= 5 && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits) return false;
  *port = atoi(text.c_str());
  return *port >= 1 && *port <= 65535;
}

bool parse_scope(const std::string& name, uint32_t* scope) {
  *scope = if_nametoindex(name.c_str());
  if (*scope != 0) return true;
  char* end = nullptr;
  unsigned long index = strtoul(name.c_str(), &end, 10);
  *scope = static_cast<uint32_t>(index);
  return !name.empty() && *end == '\0' && index > 0 && index <= UINT32_MAX;
}

bool parse_bracketed(const std::string& text, Address* out, std::string* why) {
  size_t close = text.find(']');
  int port = 0;
  bool shaped = close != std::string::npos && text.compare(close, 2, "]:") == 0 &&
                parse_port(text.substr(close + 2), &port);
  if (!shaped) return explain(why, "Net : No valid [IPv6]:port pair found in \"" + text + "\"");
  std::string host = text.substr(1, close - 1);
  size_t percent = host.find('%');
  sockaddr_in6 sin6{};
  sin6.sin6_family = AF_INET6;
  if (percent != std::string::npos && !parse_scope(host.substr(percent + 1), &sin6.sin6_scope_id)) {
    return explain(why,
                   "Net : no interface \"" + host.substr(percent + 1) + "\", which is the scope of " + text);
  }
  if (inet_pton(AF_INET6, host.substr(0, percent).c_str(), &sin6.sin6_addr) != 1) {
    return explain(why, "Net : No valid [IPv6]:port pair found in \"" + text + "\"");
  }
  assign(out, reinterpret_cast<sockaddr*>(&sin6), sizeof(sin6));
  out->set_port(port);
  return true;
}

bool resolve(const std::string& host, Address* out, std::string* why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int status = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (status != 0) {
    std::string reason = status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status);
    return explain(why, "Net : error encountered when getting address info : " + reason + " (" + host + ")");
  }
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  if (found->ai_family != AF_INET && found->ai_family != AF_INET6) {
    return explain(why, "Net : unsupported IP family");
  }
  assign(out, found->ai_addr, found->ai_addrlen);
  return true;
}

// ---- interfaces

struct Interface {
  std::string name;
  Address addr;
  unsigned flags;

  bool link_local() const {
    if (addr.ss.ss_family == AF_INET6) return IN6_IS_ADDR_LINKLOCAL(&ipv6(&addr.ss)->sin6_addr);
    return (ntohl(ipv4(&addr.ss)->sin_addr.s_addr) >> 16) == 0xa9fe;
  }
  bool starts_with(const char* prefix) const { return name.rfind(prefix, 0) == 0; }

  // The lowest rank wins.
  int rank() const {
    int kind = 0;
    if (starts_with("veth")) kind = 1;
    if (starts_with("docker")) kind = 2;
    if (flags & IFF_LOOPBACK) kind = 3;
    if (starts_with("virbr")) kind = 4;
    return kind + (link_local() ? 10 : 0);
  }
};

bool list_interfaces(std::vector<Interface>* out) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    bool up = (it->ifa_flags & IFF_UP) && (it->ifa_flags & IFF_RUNNING);
    if (!up || it->ifa_addr == nullptr) continue;
    int family = it->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Interface found{it->ifa_name, {}, it->ifa_flags};
    assign(&found.addr, it->ifa_addr, length_of(family));
    out->push_back(found);
  }
  return true;
}

// NCCL_SOCKET_IFNAME: [^][=]name[,name...]
class NameFilter {
 public:
  explicit NameFilter(const char* spec) {
    if (spec == nullptr) return;
    exclude_ = *spec == '^';
    if (exclude_) ++spec;
    exact_ = *spec == '=';
    if (exact_) ++spec;
    for (std::string rest = spec; !rest.empty();) {
      size_t comma = std::min(rest.find(','), rest.size());
      if (comma > 0) names_.push_back(rest.substr(0, comma));
      rest.erase(0, comma + 1);
    }
  }

  bool accepts(const Interface& interface) const {
    if (names_.empty()) return true;
    bool listed = std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
      return exact_ ? interface.name == name : interface.starts_with(name.c_str());
    });
    return listed != exclude_;
  }

  // Among interfaces that the user named, only link-local addresses rank lower.
  int rank(const Interface& interface) const {
    bool chosen = !names_.empty() && !exclude_;
    return chosen ? interface.link_local() : interface.rank();
  }

 private:
  bool exclude_ = false;
  bool exact_ = false;
  std::vector<std::string> names_;
};

bool wanted_family(const char* text, int* family) {
  *family = AF_UNSPEC;
  if (text == nullptr) return true;
  if (strcasecmp(text, "AF_INET") == 0) *family = AF_INET;
  if (strcasecmp(text, "AF_INET6") == 0) *family = AF_INET6;
  return *family != AF_UNSPEC;
}

std::string describe(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& interface : interfaces) {
    std::string addr = interface.addr.str();
    text += (text.empty() ? "" : ", ") + interface.name + " " + addr.substr(0, addr.rfind(':'));
  }
  return text.empty() ? "none" : text;
}

// ---- connecting and waiting

int poll_timeout(Deadline deadline) {
  constexpr int64_t kLongest = 3600 * 1000;  // the caller polls again
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, kLongest));
}

// False at the deadline (ETIMEDOUT), when stopped (ECANCELED) or on an error of poll itself.
bool wait_for(int fd, short events, Deadline deadline, const std::atomic<bool>* stop = nullptr) {
  for (;;) {
    pollfd entry{fd, events, 0};
    Deadline until = stop ? std::min<Deadline>(deadline, Clock::now() + kStopPeriod) : deadline;
    int n = poll(&entry, 1, poll_timeout(until));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
    if (stop && stop->load()) {
      errno = ECANCELED;
      return false;
    }
    if (Clock::now() >= deadline) {
      errno = ETIMEDOUT;
      return false;
    }
  }
}

// Connecting to a port without a listener succeeds if the kernel picks the same port as the local one.
bool connected_to_itself(int fd) {
  Address local, peer;
  local.len = peer.len = sizeof(sockaddr_storage);
  return getsockname(fd, any(&local), &local.len) == 0 && getpeername(fd, any(&peer), &peer.len) == 0 &&
         local.len == peer.len && memcmp(&local.ss, &peer.ss, local.len) == 0;
}

bool finish_connect(int fd, Deadline deadline, const std::atomic<bool>* stop) {
  if (!wait_for(fd, POLLOUT, deadline, stop)) return false;
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return false;
  errno = error;
  return error == 0;
}

// An empty Fd with errno set on failure.
Fd try_connect(const Address& addr, Deadline deadline, const std::atomic<bool>* stop) {
  Fd fd =
      Fd::made_by([&] { return socket(addr.ss.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd) return {};
  bool pending = connect(fd.get(), any(addr), addr.len) != 0;
  if (pending && errno != EINPROGRESS && errno != EINTR) return {};
  if (pending && !finish_connect(fd.get(), deadline, stop)) return {};
  if (connected_to_itself(fd.get())) {
    errno = ECONNREFUSED;
    return {};
  }
  int on = 1;
  if (setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) return {};
  int flags = fcntl(fd.get(), F_GETFL);
  if (flags < 0 || fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) return {};
  return fd;
}

}  // namespace

std::string Address::str() const {
  char host[INET6_ADDRSTRLEN] = "";
  std::string port_text = std::to_string(port());
  if (ss.ss_family == AF_INET) {
    inet_ntop(AF_INET, &ipv4(&ss)->sin_addr, host, sizeof(host));
    return std::string(host) + ":" + port_text;
  }
  if (ss.ss_family != AF_INET6) return "";
  const sockaddr_in6* sin6 = ipv6(&ss);
  inet_ntop(AF_INET6, &sin6->sin6_addr, host, sizeof(host));
  char name[IF_NAMESIZE];
  std::string scope;
  if (sin6->sin6_scope_id != 0) {
    const char* found = if_indextoname(sin6->sin6_scope_id, name);
    scope = "%" + (found != nullptr ? found : std::to_string(sin6->sin6_scope_id));
  }
  return "[" + std::string(host) + scope + "]:" + port_text;
}

int Address::port() const {
  return ntohs(ss.ss_family == AF_INET6 ? ipv6(&ss)->sin6_port : ipv4(&ss)->sin_port);
}

void Address::set_port(int port) {
  uint16_t value = htons(static_cast<uint16_t>(port));
  if (ss.ss_family == AF_INET6) {
    ipv6(&ss)->sin6_port = value;
  } else {
    ipv4(&ss)->sin_port = value;
  }
}

bool Address::parse(const char* text, Address* out, std::string* why) {
  if (text == nullptr || text[0] == '\0') return explain(why, "Net : string is null");
  std::string pair = text;
  if (pair[0] == '[') return parse_bracketed(pair, out, why);
  size_t colon = pair.find(':');
  int port = 0;
  bool shaped = colon != std::string::npos && colon > 0 && parse_port(pair.substr(colon + 1), &port);
  if (!shaped) return explain(why, "Net : No valid <IPv4_or_hostname>:<port> pair found in \"" + pair + "\"");
  if (!resolve(pair.substr(0, colon), out, why)) return false;
  out->set_port(port);
  return true;
}

bool wait_readable(int fd, Deadline deadline) { return wait_for(fd, POLLIN, deadline); }
bool wait_writable(int fd, Deadline deadline) { return wait_for(fd, POLLOUT, deadline); }

std::string describe_error(int error) {
  std::string text = strerror(error);
  rlimit limit{};
  if (error == ENFILE) return text + ": the machine has no file descriptor left (fs.file-max)";
  if (error != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0) return text;
  return text + ": all " + std::to_string(limit.rlim_cur) +
         " file descriptors that RLIMIT_NOFILE (ulimit -n) allows this process are in use";
}

Descriptors count_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  Descriptors found{0, size_t(limit.rlim_cur)};
  std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (!folder && out_of_descriptors(errno)) found.open = found.limit;
  while (folder && readdir(folder.get())) ++found.open;
  return found;  // "." and ".." stand for this descriptor and one that another thread may open
}

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Fd::reset() {
  if (fd_ < 0) return;
  int saved_errno = errno;
  NoFork().close(fd_);
  errno = saved_errno;
  fd_ = -1;
}

ncclResult_t pick_interface(Address* out) {
  const char* names = param_str("NCCL_SOCKET_IFNAME");
  const char* family_text = param_str("NCCL_SOCKET_FAMILY");
  int family;
  if (!wanted_family(family_text, &family)) {
    return fail(ncclInvalidUsage, "NCCL_SOCKET_FAMILY is \"%s\", neither AF_INET nor AF_INET6", family_text);
  }
  std::vector<Interface> interfaces;
  if (!list_interfaces(&interfaces)) return fail(ncclSystemError, "Net : getifaddrs : %s", strerror(errno));
  NameFilter filter(names);
  const Interface* best = nullptr;
  for (const Interface& interface : interfaces) {
    if (family != AF_UNSPEC && interface.addr.ss.ss_family != family) continue;
    if (!filter.accepts(interface)) continue;
    if (best == nullptr || filter.rank(interface) < filter.rank(*best)) best = &interface;
  }
  if (best == nullptr) {
    bool asked = names != nullptr || family_text != nullptr;
    return fail(asked ? ncclInvalidUsage : ncclSystemError,
                "Net : no socket interface found (NCCL_SOCKET_IFNAME=%s, NCCL_SOCKET_FAMILY=%s); those that "
                "are up: %s",
                names != nullptr ? names : "", family_text != nullptr ? family_text : "",
                describe(interfaces).c_str());
  }
  *out = best->addr;
  log(Level::Info, "Net : using interface %s %s", best->name.c_str(), best->addr.str().c_str());
  return ncclSuccess;
}

Fd listen_on(Address* addr, std::string* why) {
  auto failed = [&](const char* call) {
    explain(why, error_text("Net : " + std::string(call) + " on " + addr->str(), errno));
    return Fd();
  };
  Fd fd = Fd::made_by([&] { return socket(addr->ss.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  if (!fd) return failed("socket");
  int on = 1;
  bool fixed = addr->port() != 0;  // connections of an earlier listener may be in TIME_WAIT
  if (fixed && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0)
    return failed("setsockopt");
  if (bind(fd.get(), any(addr), addr->len) != 0) return failed("bind");
  socklen_t len = addr->len;
  if (listen(fd.get(), kBacklog) != 0) return failed("listen");
  if (getsockname(fd.get(), any(addr), &len) != 0) return failed("getsockname");
  return fd;
}

Fd connect_to(const Address& addr, Deadline deadline, std::string* why, Deadline retry_until,
              const std::atomic<bool>* stop) {
  auto backoff = std::chrono::duration_cast<Clock::duration>(kFirstBackoff);
  retry_until = std::min(retry_until, deadline);
  for (;;) {
    Fd fd = try_connect(addr, deadline, stop);
    if (fd) return fd;
    int error = errno;
    auto now = Clock::now();
    if (error != ECONNREFUSED || now >= retry_until || (stop && stop->load())) {
      explain(why, error_text("Net : connect to " + addr.str(), error));
      errno = error;
      return {};
    }
    std::this_thread::sleep_for(std::min(backoff, retry_until - now));
    backoff = std::min<Clock::duration>(backoff * 2, kLongestBackoff);
  }
}

bool send_all(int fd, const void* data, size_t size, Deadline deadline) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    ssize_t n = send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      at += n;
      size -= static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      if (!wait_for(fd, POLLOUT, deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool recv_all(int fd, void* data, size_t size, Deadline deadline) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    ssize_t n = recv(fd, at, size, MSG_DONTWAIT);
    if (n > 0) {
      at += n;
      size -= static_cast<size_t>(n);
    } else if (n == 0) {
      errno = ECONNRESET;
      return false;
    } else if (errno == EAGAIN) {
      if (!wait_for(fd, POLLIN, deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace pncpu
