// What strangers can do to a process that uses the CPU library, and what they cannot: each test is a victim
// that runs a job while processes which know nothing, or only what is public, try to take its descriptors,
// memory, processor time, or the place of a rank. Each test says in a line what it leaves out without root.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "base/nccl.hpp"
#include "harness.hpp"
#include "service/ids.hpp"
#include "service/wire.hpp"

using namespace testing;
using namespace pncpu;

namespace {

#define OK(call) CHECK_EQ(int(call), int(ncclSuccess))

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void pause_for(double seconds) { usleep(useconds_t(seconds * 1e6)); }

// ---- the victim's gauges ----

int open_descriptors() {
  int n = -3;  // ".", ".." and the folder's own
  DIR* folder = opendir("/proc/self/fd");
  if (!folder) return INT32_MAX;
  while (readdir(folder)) ++n;
  closedir(folder);
  return n;
}

long resident_kib() {
  long pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](timeval t) { return double(t.tv_sec) + double(t.tv_usec) / 1e6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// AddressSanitizer keeps what is freed for a while, up to 256 MiB.
#if defined(__SANITIZE_ADDRESS__)
constexpr long kQuarantineKib = 300 * 1024;
#else
constexpr long kQuarantineKib = 0;
#endif

// What this process used since the gauge was made.
struct Gauge {
  int descriptors = open_descriptors();
  long kib = resident_kib();
  double processor = processor_seconds(), began = now();
  bool grew_beyond(long most_kib) const { return resident_kib() - kib > most_kib + kQuarantineKib; }
  double share() const { return (processor_seconds() - processor) / (now() - began); }
};

void limit_descriptors(rlim_t n) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min(n, limit.rlim_max);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// ---- where the victim listens ----

std::vector<unsigned long> own_sockets() {
  std::vector<unsigned long> inodes;
  for (auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    std::string to = fs::read_symlink(entry.path(), gone).string();
    unsigned long inode;
    if (!gone && sscanf(to.c_str(), "socket:[%lu]", &inode) == 1) inodes.push_back(inode);
  }
  return inodes;
}

std::vector<sockaddr_in> tcp_listeners() {
  std::vector<unsigned long> mine = own_sockets();
  std::vector<sockaddr_in> found;
  std::ifstream table("/proc/self/net/tcp");
  for (std::string line; std::getline(table, line);) {
    unsigned ip, port, state;
    unsigned long inode;
    if (sscanf(line.c_str(), " %*d: %8X:%4X %*s %2X %*s %*s %*s %*u %*d %lu", &ip, &port, &state, &inode) !=
        4)
      continue;
    if (state != 0x0a || !std::count(mine.begin(), mine.end(), inode)) continue;
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = ip;
    in.sin_port = htons(uint16_t(port));
    found.push_back(in);
  }
  CHECK(!found.empty());
  return found;
}

std::string unix_listener() {
  std::vector<unsigned long> mine = own_sockets();
  std::ifstream table("/proc/self/net/unix");
  for (std::string line; std::getline(table, line);) {
    unsigned flags;
    unsigned long inode;
    char name[128] = "";
    if (sscanf(line.c_str(), "%*s %*s %*s %x %*s %*s %lu %127s", &flags, &inode, name) != 3) continue;
    if (flags == 0x10000 && name[0] == '@' && std::count(mine.begin(), mine.end(), inode)) return name + 1;
  }
  CHECK(!"this process listens on no Unix socket");
  return "";
}

// ---- strangers: processes that have nothing of the library's ----

int connect_tcp(const sockaddr_in& to) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) return fd;
  close(fd);
  return -1;
}

int connect_unix_name(const std::string& name) {
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  memcpy(un.sun_path + 1, name.data(), name.size());
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&un),
              socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size())) == 0)
    return fd;
  close(fd);
  return -1;
}

// All that comes until the end of the connection or `seconds` have passed; false when it has not ended.
bool read_to_end(int fd, double seconds, std::string* got = nullptr) {
  for (double until = now() + seconds; now() < until;) {
    pollfd entry{fd, POLLIN, 0};
    if (poll(&entry, 1, int((until - now()) * 1000) + 1) <= 0) continue;
    char bytes[4096];
    ssize_t n = recv(fd, bytes, sizeof bytes, 0);
    if (n <= 0) return true;
    if (got) got->append(bytes, size_t(n));
  }
  return false;
}

bool read_exactly(int fd, void* into, size_t size) {
  for (size_t done = 0; done < size;) {
    pollfd entry{fd, POLLIN, 0};
    if (poll(&entry, 1, 10000) <= 0) return false;
    ssize_t n = recv(fd, static_cast<char*>(into) + done, size - done, 0);
    if (n <= 0) return false;
    done += size_t(n);
  }
  return true;
}

template <class T>
void put(int fd, const T& what) {
  if (send(fd, &what, sizeof what, MSG_NOSIGNAL) < 0) return;  // dropped already
}

class Child {
 public:
  template <class Body>
  explicit Child(Body body) {
    fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(100);
    failures = 0;
    body();
    fflush(nullptr);
    _exit(failures == 0 ? 0 : 1);
  }
  int wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

// ---- the job ----

void run_rank(ncclComm_t comm, int nranks) {
  std::vector<float> small(10, 1), large(100000, 1);
  for (std::vector<float>* x : {&small, &large}) {
    OK(ncclAllReduce(x->data(), x->data(), x->size(), ncclFloat32, ncclSum, comm, nullptr));
    OK(pyncclCpuStreamSynchronize(comm, nullptr, -1));
    CHECK_EQ(size_t(std::count(x->begin(), x->end(), float(nranks))), x->size());
  }
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
}

void take_part(const ncclUniqueId& id, int nranks, int rank) {
  ncclComm_t comm = nullptr;
  ncclResult_t r = ncclCommInitRank(&comm, nranks, id, rank);
  if (r != ncclSuccess) fprintf(stderr, "rank %d: %s\n", rank, ncclGetLastError(nullptr));
  OK(r);
  if (comm) run_rank(comm, nranks);
}

// AddressSanitizer's allocator does not survive a fork while another thread allocates.
void let_service_rest() { pause_for(0.05); }

// A job whose rank 0 is this process. The other ranks are forked when it is made and wait for its id.
class Job {
 public:
  explicit Job(int nranks) : nranks_(nranks) {
    let_service_rest();
    for (int r = 1; r < nranks; ++r) {
      int ends[2];
      CHECK_EQ(pipe(ends), 0);
      ids_.push_back(ends[1]);
      others_.push_back(std::make_unique<Child>([=] {
        ncclUniqueId id;
        CHECK_EQ(read(ends[0], &id, sizeof id), ssize_t(sizeof id));
        take_part(id, nranks, r);
      }));
      close(ends[0]);
    }
  }
  void run() {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    for (int fd : ids_) CHECK_EQ(write(fd, &id, sizeof id), ssize_t(sizeof id));
    take_part(id, nranks_, 0);
    for (auto& child : others_) CHECK_EQ(child->wait(), 0);
    for (int fd : ids_) close(fd);
  }

 private:
  int nranks_;
  std::vector<int> ids_;
  std::vector<std::unique_ptr<Child>> others_;
};

void run_job(int nranks) { Job(nranks).run(); }

ncclUniqueId new_id() {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  let_service_rest();
  return id;
}

void start_service() { new_id(); }

sockaddr_in use_public_id() {
  sockaddr_in in{};
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof in;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK_EQ(bind(fd, reinterpret_cast<sockaddr*>(&in), size), 0);
  CHECK_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&in), &size), 0);
  close(fd);
  set("NCCL_COMM_ID", ("127.0.0.1:" + std::to_string(ntohs(in.sin_port))).c_str());
  return in;
}

Hello public_hello(int rank) {
  Hello hello;
  hello.token = Token::of(getenv("NCCL_COMM_ID"));
  hello.rank = rank;
  return hello;
}

Announce announce_as(int rank, int nranks) {
  Announce a;
  a.rank = rank;
  a.nranks = nranks;
  snprintf(a.host_name, sizeof a.host_name, "evil");
  return a;
}

void put_frame(int fd, Ctl kind, const void* body, size_t size, uint32_t claimed) {
  put(fd, CtlHeader{kind, claimed, 0});
  if (size && send(fd, body, size, MSG_NOSIGNAL) < 0) return;
}

int connect_patiently(const sockaddr_in& to) {
  for (double until = now() + 20; now() < until; pause_for(0.01))
    if (int fd = connect_tcp(to); fd >= 0) return fd;
  CHECK(!"nobody listens");
  return -1;
}

// ---- who sends nothing, little, or nonsense ----

constexpr int kFlood = 400;

template <class Connect>
void hold_idle(Connect connect) {
  std::vector<int> fds(kFlood, -1);
  for (;;)
    for (int& fd : fds) {
      char byte;
      bool open = fd >= 0 && recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
      if (open) continue;
      if (fd >= 0) close(fd);
      fd = connect();
      if (fd < 0) pause_for(0.01);
    }
}

// Descriptors, memory and processor time stay as small as they were when it was `quiet`; files can be opened
// and the jobs run meanwhile.
void endures(const Gauge& quiet, Job& two, Job& three) {
  Gauge during;
  int most = 0;
  for (double until = now() + 2; now() < until; pause_for(0.02)) {
    most = std::max(most, open_descriptors());
    int fd = open("/dev/null", O_RDONLY);
    CHECK(fd >= 0);
    close(fd);
  }
  double share = during.share();
  if (most > quiet.descriptors + 70 || share > 0.25)
    fprintf(stderr, "%d descriptors, before %d; %.0f %% of a core\n", most, quiet.descriptors, 100 * share);
  CHECK(most <= quiet.descriptors + 70);
  CHECK(share < 0.25);
  two.run();
  three.run();
  CHECK(!quiet.grew_beyond(64 * 1024));
}

void idle_connections_over_tcp() {
  limit_descriptors(400);
  Job two(2), three(3);
  start_service();
  Gauge quiet;
  sockaddr_in at = tcp_listeners()[0];
  Child a([&] { hold_idle([&] { return connect_tcp(at); }); });
  pause_for(0.3);
  endures(quiet, two, three);
}

void idle_connections_over_the_unix_socket() {
  limit_descriptors(400);
  Job two(2), three(3);
  start_service();
  Gauge quiet;
  std::string name = unix_listener();
  Child a([&] { hold_idle([&] { return connect_unix_name(name); }); });
  pause_for(0.3);
  endures(quiet, two, three);
}

void another_user_on_the_unix_socket() {
  if (geteuid() != 0) return void(printf("     left out: only root can become another user\n"));
  limit_descriptors(256);
  Job two(2), three(3);
  start_service();
  Gauge quiet;
  std::string name = unix_listener();
  Child a([&] {
    CHECK_EQ(setgroups(0, nullptr), 0);
    CHECK_EQ(setgid(65534), 0);
    CHECK_EQ(setuid(65534), 0);
    int fd = connect_unix_name(name);
    CHECK(fd >= 0);
    double began = now();
    CHECK(read_to_end(fd, 5));
    CHECK(now() - began < 0.9);  // another's connection does not get the second that one's own has
  });
  CHECK_EQ(a.wait(), 0);
  Child b([&] {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(1);
    hold_idle([&] { return connect_unix_name(name); });
  });
  pause_for(0.3);
  endures(quiet, two, three);
}

void one_byte_at_a_time() {
  Job job(2);
  start_service();
  sockaddr_in at = tcp_listeners()[0];
  Child slow([&] {
    int fd = connect_tcp(at);
    Hello hello;
    double began = now();
    bool ended = false;
    for (size_t i = 0; i < 60 && !ended; ++i) {
      if (send(fd, reinterpret_cast<char*>(&hello) + i, 1, MSG_NOSIGNAL) < 0) ended = true;
      ended = ended || read_to_end(fd, 0.1);
    }
    CHECK(ended);
    CHECK(now() - began < 8);
  });
  job.run();
  CHECK_EQ(slow.wait(), 0);
}

void nonsense() {
  Job job(4);
  start_service();
  std::vector<sockaddr_in> at = tcp_listeners();
  std::string name = unix_listener();
  Child noisy([&] {
    std::string greetings[] = {"", "GET / HTTP/1.0\r\n\r\n", std::string(64, '\0'), std::string(1 << 16, 'x'),
                               "pynccl01pynccl01pynccl01pynccl01pynccl01pynccl01"};
    Hello hello;  // sound, but without a token
    greetings[0].assign(reinterpret_cast<char*>(&hello), sizeof hello);
    for (int round = 0; round < 200; ++round)
      for (const std::string& greeting : greetings) {
        int fd = round % 2 ? connect_tcp(at[0]) : connect_unix_name(name);
        if (fd < 0) continue;
        if (send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) pause_for(0);
        std::string got;
        if (round < 4) CHECK(read_to_end(fd, 5, &got));
        CHECK_EQ(got.size(), size_t(0));
        close(fd);
      }
  });
  job.run();
  CHECK_EQ(noisy.wait(), 0);
  run_job(2);
}

void a_flood_of_nonsense() {
  Job two(2), three(3);
  start_service();
  Gauge quiet;
  sockaddr_in at = tcp_listeners()[0];
  Child noisy([&] {
    for (;;) {
      int fd = connect_tcp(at);
      if (fd < 0) continue;
      if (send(fd, "nonsense that is longer than eight bytes", 40, MSG_NOSIGNAL) < 0) pause_for(0);
      linger now_{1, 0};
      setsockopt(fd, SOL_SOCKET, SO_LINGER, &now_, sizeof now_);
      close(fd);
    }
  });
  pause_for(0.3);
  endures(quiet, two, three);
}

// ---- who knows the public id ----

// Each of these in its turn, while rank 0 waits for rank 1.
void huge_numbers() {
  sockaddr_in at = use_public_id();
  Gauge gauge;
  Child other([&] {
    pause_for(1.5);
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    take_part(id, 2, 1);
  });
  Child evil([&] {
    for (int what = 0; what < 8; ++what) {
      int fd = connect_patiently(at);
      put(fd, public_hello(1));
      Announce a = announce_as(1, 2);
      uint32_t claimed = sizeof a;
      if (what == 0) a.nranks = 100000000;
      if (what == 1) a.nranks = INT32_MIN;
      if (what == 2) a.rank = 100000000;
      if (what == 3) a.nids = 1 << 30;
      if (what == 4) a.share = INT32_MAX;
      if (what == 5) claimed = UINT32_MAX;
      if (what == 6) claimed = 1 << 30;
      if (what < 7)
        put_frame(fd, Ctl::Announce, &a, sizeof a, claimed);
      else
        put_frame(fd, Ctl::Table, nullptr, 0, 16 << 20);
      CHECK(read_to_end(fd, 10));
      close(fd);
    }
  });
  ncclUniqueId id = new_id();
  take_part(id, 2, 0);
  CHECK_EQ(evil.wait(), 0);
  CHECK_EQ(other.wait(), 0);
  CHECK(!gauge.grew_beyond(48 * 1024));
}

// A stranger takes rank 1's seat first. Rank 1 comes, and the job ends, saying so.
void a_seat_taken_without_a_secret() {
  sockaddr_in at = use_public_id();
  int seated[2];
  CHECK_EQ(pipe(seated), 0);
  Child evil([&] {
    int fd = connect_patiently(at);
    put(fd, public_hello(1));
    Announce a = announce_as(1, 3);
    put_frame(fd, Ctl::Announce, &a, sizeof a, sizeof a);
    pause_for(0.3);
    CHECK_EQ(write(seated[1], "x", 1), 1);
    std::string got;
    CHECK(read_to_end(fd, 30, &got));
    // No table, no pid, no address of memory: a text that ends the job.
    CHECK(got.size() < 500);
    CHECK(!contains(got, "pid"));
    CHECK(contains(got, "twice"));
  });
  auto rank = [&](int r) {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    ncclComm_t comm = nullptr;
    CHECK_EQ(int(ncclCommInitRank(&comm, 3, id, r)), int(ncclInvalidArgument));
    std::string text = ncclGetLastError(nullptr);
    CHECK(contains(text, "rank 1 was taken twice"));
    CHECK(contains(text, "evil (127.0.0.1:"));
  };
  Child other([&] {
    char byte;
    CHECK_EQ(read(seated[0], &byte, 1), 1);
    rank(1);
  });
  rank(0);
  CHECK_EQ(other.wait(), 0);
  CHECK_EQ(evil.wait(), 0);
}

// All seats are taken, one by a stranger who never confirms: nobody learns of anybody.
void a_stranger_who_does_not_introduce_itself() {
  set("PYNCCL_CPU_INIT_TIMEOUT", "2");
  sockaddr_in at = use_public_id();
  Child evil([&] {
    int fd = connect_patiently(at);
    put(fd, public_hello(1));
    Announce a = announce_as(1, 2);
    put_frame(fd, Ctl::Announce, &a, sizeof a, sizeof a);
    std::string got;
    CHECK(read_to_end(fd, 30, &got));
    CHECK(got.size() < 500);  // far less than a table
    CHECK(!contains(got, "pid"));
  });
  ncclUniqueId id = new_id();
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 0)), int(ncclTimeout));
  CHECK(contains(ncclGetLastError(nullptr), "rank 1 (on evil, 127.0.0.1:"));
  CHECK_EQ(evil.wait(), 0);
}

// ---- the secret ----

// What a stranger with this secret ("" for none) gets to hear as rank 1, before it announces itself.
std::string greet(const sockaddr_in& at, const std::string& secret, Hello hello, Digest* replay = nullptr) {
  int fd = connect_patiently(at);
  hello.secured = !secret.empty();
  put(fd, hello);
  std::string got;
  if (!secret.empty()) {
    Challenge challenge;
    CHECK(read_exactly(fd, &challenge, sizeof challenge));
    CHECK_EQ(challenge.secured, 1u);
    Digest answer = proof(secret, Role::Connects, hello, challenge.nonce);
    put(fd, replay ? *replay : answer);
  }
  Announce a = announce_as(1, 2);
  put_frame(fd, Ctl::Announce, &a, sizeof a, sizeof a);
  CHECK(read_to_end(fd, 10, &got));
  close(fd);
  return got;
}

void with_a_secret_only_who_has_it_gets_in() {
  set("PYNCCL_SECRET", "open sesame");
  sockaddr_in at = use_public_id();
  Child evil([&] {
    CHECK(contains(greet(at, "", public_hello(1)), "has a secret (PYNCCL_SECRET)"));
    CHECK_EQ(greet(at, "open barley", public_hello(1)), std::string());
    CHECK_EQ(greet(at, "open sesame ", public_hello(1)), std::string());
    // What a rank with the secret once said on another connection.
    int fd = connect_patiently(at);
    Hello hello = public_hello(1);
    hello.secured = 1;
    put(fd, hello);
    Challenge challenge;
    CHECK(read_exactly(fd, &challenge, sizeof challenge));
    Digest theirs = proof("open sesame", Role::Listens, hello, challenge.nonce);
    CHECK(equal_in_constant_time(theirs.data(), challenge.proof.data(), theirs.size()));
    Digest recorded = proof("open sesame", Role::Connects, hello, challenge.nonce);
    put(fd, recorded);
    close(fd);
    CHECK_EQ(greet(at, "open sesame", hello, &recorded), std::string());
    // The root's own proof, sent back.
    CHECK_EQ(greet(at, "open sesame", hello, &theirs), std::string());
  });
  Child other([&] {
    pause_for(1.5);
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    take_part(id, 2, 1);
  });
  ncclUniqueId id = new_id();
  take_part(id, 2, 0);
  CHECK_EQ(evil.wait(), 0);
  CHECK_EQ(other.wait(), 0);
}

// An id from ncclGetUniqueId, whose root and rank 0 have the secret `mine`, and rank 1 has `theirs`.
void secrets_differ(const char* mine, const char* theirs, const char* at_root, const char* at_rank) {
  CHECK_EQ(in_child([&] {
             if (*mine) set("PYNCCL_SECRET", mine);
             ncclUniqueId id;
             OK(ncclGetUniqueId(&id));
             Child other([&] {
               unsetenv("PYNCCL_SECRET");
               if (*theirs) set("PYNCCL_SECRET", theirs);
               ncclComm_t comm = nullptr;
               CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 1)), int(ncclInvalidUsage));
               std::string text = ncclGetLastError(nullptr);
               if (!contains(text, at_rank)) fprintf(stderr, "rank 1: %s\n", text.c_str());
               CHECK(contains(text, at_rank));
             });
             ncclComm_t comm = nullptr;
             CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 0)), int(ncclInvalidUsage));
             std::string text = ncclGetLastError(nullptr);
             if (!contains(text, at_root)) fprintf(stderr, "rank 0: %s\n", text.c_str());
             CHECK(contains(text, at_root));
             CHECK_EQ(other.wait(), 0);
           }),
           0);
}

void a_secret_on_one_side_only_is_said_on_both() {
  secrets_differ("a", "", "has no secret (PYNCCL_SECRET), and the root has one", "this rank has none");
  secrets_differ("", "b", "has a secret (PYNCCL_SECRET), and the root has none", "the other has none");
  secrets_differ("a", "b", "the root's secret", "another secret");
}

void secrets_from_a_file() {
  fs::path file = scratch / "secret";
  write_text(file, " of a file\n");
  set("PYNCCL_SECRET_FILE", file.c_str());
  chmod(file.c_str(), 0644);
  ncclUniqueId id;
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "is open to every user (mode 0644); expected 0600"));
  chmod(file.c_str(), 0600);
  OK(ncclGetUniqueId(&id));
  Child other([&] {
    unsetenv("PYNCCL_SECRET_FILE");
    set("PYNCCL_SECRET", "of a file");
    take_part(id, 2, 1);
  });
  take_part(id, 2, 0);
  CHECK_EQ(other.wait(), 0);
  write_text(file, "\n");
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "is empty; expected the secret"));
  set("PYNCCL_SECRET_FILE", "/nowhere");
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "cannot read '/nowhere'"));
}

void a_secret_is_never_shown() {
  set("PYNCCL_SECRET", "not for logs");
  const char* value = nullptr;
  int length = 0;
  OK(ncclParamGetParameter("PYNCCL_SECRET", &value, &length));
  CHECK_EQ(std::string(value), std::string("<hidden>"));
  fs::path file = scratch / "log";
  set("NCCL_DEBUG_FILE", file.c_str());
  set("NCCL_DEBUG", "TRACE");
  ncclParamDumpAll();
  run_job(2);
  CHECK(contains(read_text(file), "PYNCCL_SECRET"));
  CHECK(!contains(read_text(file), "not for logs"));
}

void a_public_id_is_warned_of_once() {
  fs::path file = scratch / "log";
  set("NCCL_DEBUG_FILE", file.c_str());
  set("NCCL_DEBUG", "WARN");
  use_public_id();
  run_job(2);
  run_job(2);
  std::string text = read_text(file);
  size_t at = text.find(" is public: ");
  CHECK(at != std::string::npos);
  CHECK(text.find(" is public: ", at + 1) == std::string::npos);
  // The second job's rank 1 is another process.
  CHECK(contains(text, "rank 1 of the communicator that NCCL_COMM_ID made before was pid "));
  CHECK(!contains(text, "rank 0 of the communicator that"));
}

std::string hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (uint8_t byte : digest) snprintf(two, sizeof two, "%02x", byte), text += two;
  return text;
}

// FIPS 180-4's examples (NIST's SHA256.pdf) and RFC 4231.
void hashes() {
  auto hash = [](const std::string& text) { return hex(sha256(text.data(), text.size())); };
  auto mac = [](const std::string& key, const std::string& text) {
    return hex(hmac_sha256(key, text.data(), text.size()));
  };
  using std::string;
  CHECK_EQ(hash("abc"), string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  CHECK_EQ(hash(""), string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  CHECK_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  CHECK_EQ(hash(string(1000000, 'a')),
           string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
  CHECK_EQ(mac(string(20, '\x0b'), "Hi There"),
           string("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  CHECK_EQ(mac("Jefe", "what do ya want for nothing?"),
           string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(mac(string(20, '\xaa'), string(50, '\xdd')),
           string("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"));
  CHECK_EQ(mac(string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
  CHECK(equal_in_constant_time("abc", "abc", 3));
  CHECK(!equal_in_constant_time("abc", "abd", 3));
}

// ---- the process's own limits ----

void no_descriptor_left_and_then_some() {
  limit_descriptors(256);
  Job job(2);
  start_service();
  sockaddr_in at = tcp_listeners()[0];
  std::vector<int> hoard;
  for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;) hoard.push_back(fd);
  CHECK_EQ(errno, EMFILE);
  Child knocking([&] { hold_idle([&] { return connect_tcp(at); }); });
  pause_for(0.5);
  Gauge gauge;
  pause_for(1.5);
  CHECK(gauge.share() < 0.2);
  for (int fd : hoard) close(fd);
  job.run();
}

void no_thread_for_the_service() {
  if (geteuid() == 0) {
    CHECK_EQ(setgid(65534), 0);
    CHECK_EQ(setuid(65534), 0);
  }
  rlimit none{0, 0}, before{};
  getrlimit(RLIMIT_NPROC, &before);
  none.rlim_max = before.rlim_max;
  CHECK_EQ(setrlimit(RLIMIT_NPROC, &none), 0);
  int descriptors = open_descriptors();
  ncclUniqueId id;
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclSystemError));
  CHECK(contains(ncclGetLastError(nullptr), "no thread is to be had"));
  CHECK(contains(ncclGetLastError(nullptr), "RLIMIT_NPROC"));
  CHECK_EQ(open_descriptors(), descriptors);
  CHECK_EQ(setrlimit(RLIMIT_NPROC, &before), 0);
  run_job(2);
}

// Ranks that need more descriptors than they may have say so, and nobody is taken for dead.
void too_few_descriptors_for_the_peers() {
  constexpr int kRanks = 24;
  set("PYNCCL_CPU_INIT_TIMEOUT", "20");
  ncclUniqueId id = new_id();
  Gate gate;
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < kRanks; ++r)
    ranks.push_back(std::make_unique<Child>([&, r] {
      gate.wait();
      limit_descriptors(rlim_t(open_descriptors()) + 20);
      ncclComm_t comm = nullptr;
      CHECK_EQ(int(ncclCommInitRank(&comm, kRanks, id, r)), int(ncclSystemError));
      std::string text = ncclGetLastError(nullptr);
      if (!contains(text, "RLIMIT_NOFILE")) fprintf(stderr, "%s\n", text.c_str());
      CHECK(contains(text, "needs 24 file descriptors for its peers"));
      CHECK(contains(text, "RLIMIT_NOFILE"));
    }));
  gate.open(kRanks);
  for (auto& rank : ranks) CHECK_EQ(rank->wait(), 0);
}

void ranks_as_threads_need_no_descriptors() {
  limit_descriptors(64);
  ncclUniqueId id = new_id();
  Gauge gauge;
  std::vector<std::thread> ranks;
  for (int r = 0; r < 40; ++r) ranks.emplace_back([&, r] { take_part(id, 40, r); });
  for (std::thread& t : ranks) t.join();
  CHECK(open_descriptors() <= gauge.descriptors + 4);
}

void many_ranks_in_one_process() {
  std::vector<ncclComm_t> comms(200, nullptr);
  limit_descriptors(64);
  OK(ncclCommInitAll(comms.data(), 200, nullptr));
  std::vector<float> x(200, 1);
  OK(ncclGroupStart());
  for (size_t i = 0; i < comms.size(); ++i)
    OK(ncclAllReduce(&x[i], &x[i], 1, ncclFloat32, ncclSum, comms[i], nullptr));
  OK(ncclGroupEnd());
  for (ncclComm_t comm : comms) OK(pyncclCpuStreamSynchronize(comm, nullptr, -1));
  CHECK_EQ(std::count(x.begin(), x.end(), 200.0f), 200);
  for (ncclComm_t comm : comms) OK(ncclCommDestroy(comm));
}

void too_many_ranks_are_refused_at_once() {
  std::vector<ncclComm_t> comms(5000, nullptr);
  double began = now();
  CHECK_EQ(int(ncclCommInitAll(comms.data(), 5000, nullptr)), int(ncclSystemError));
  CHECK(contains(ncclGetLastError(nullptr), "ndev is 5000"));
  CHECK(contains(ncclGetLastError(nullptr), std::to_string(kMostLocalRanks)));
  Gauge gauge;
  ncclUniqueId id = new_id();
  CHECK_EQ(int(ncclCommInitRank(&comms[0], 8000000, id, 0)), int(ncclSystemError));
  CHECK(contains(ncclGetLastError(nullptr), "8000000 ranks"));
  CHECK(!gauge.grew_beyond(16 * 1024));
  CHECK(now() - began < 30);
}

void missing_ranks_are_listed_in_few_words() {
  set("PYNCCL_CPU_INIT_TIMEOUT", "0.5");
  ncclUniqueId id = new_id();
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 50000, id, 3)), int(ncclTimeout));
  std::string text = ncclGetLastError(nullptr);
  CHECK(contains(text, "1 of 50000 ranks joined, missing ranks 0, 1, 2, 4, "));
  CHECK(contains(text, " and 49983 more"));
  CHECK(text.size() < 300);
}

// ---- unique ids ----

void ids_cost_nothing() {
  auto creation = [] {
    double began = now();
    for (int i = 0; i < 20; ++i) {
      ncclUniqueId id;
      ncclComm_t comm;
      OK(ncclGetUniqueId(&id));
      OK(ncclCommInitRank(&comm, 1, id, 0));
      OK(ncclCommDestroy(comm));
    }
    return (now() - began) / 20;
  };
  creation();
  double before = creation();
  Gauge gauge;
  ncclUniqueId first, id;
  OK(ncclGetUniqueId(&first));
  for (int i = 0; i < 200000; ++i) OK(ncclGetUniqueId(&id));
  CHECK(!gauge.grew_beyond(4096));
  double after = creation();
  if (after > 10 * before + 1e-3)
    fprintf(stderr, "a creation takes %.2f ms, took %.2f\n", after * 1e3, before * 1e3);
  CHECK(after < 10 * before + 1e-3);
  Gauge idle;
  pause_for(1);
  CHECK(idle.share() < 0.05);
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, 1, first, 0));  // the oldest is as good as the newest
  OK(ncclCommDestroy(comm));
}

void done_ids_cost_nothing() {
  std::vector<ncclUniqueId> used;
  auto use = [&](int n) {
    for (int i = 0; i < n; ++i) {
      ncclUniqueId id;
      ncclComm_t comm;
      OK(ncclGetUniqueId(&id));
      OK(ncclCommInitRank(&comm, 1, id, 0));
      OK(ncclCommDestroy(comm));
      used.push_back(id);
    }
  };
  use(3000);
  Gauge gauge;
  use(3000);
  CHECK(!gauge.grew_beyond(3000));
  ncclComm_t comm;
  CHECK_EQ(int(ncclCommInitRank(&comm, 1, used.back(), 0)), int(ncclInvalidUsage));
  CHECK(contains(ncclGetLastError(nullptr),
                 "this unique id has been used already, for a communicator of 1 ranks"));
  CHECK_EQ(int(ncclCommInitRank(&comm, 1, used.front(), 0)), int(ncclInvalidUsage));
  CHECK(contains(ncclGetLastError(nullptr), "used long ago"));
}

void an_id_book_of_gaps_is_bounded() {
  IdBook book;
  Id id, first;
  book.make(&first);
  for (int i = 0; i < 100000; ++i) {
    book.make(&id);
    if (i % 2) book.done(id.serial, ncclInvalidUsage, "done");
  }
  IdBook::End end;
  CHECK(book.is_done(id.serial, &end));
  CHECK(!book.is_done(id.serial - 1, &end));
  CHECK(book.mine(id.token, id.serial));
  CHECK(!book.mine(id.token, id.serial - 1));
  CHECK(!book.mine(id.token, id.serial + 1));
  CHECK(!IdBook().mine(id.token, id.serial));
}

// ---- namespaces ----

// Each rank is process 1 of its own namespace, and their memory looks alike.
void twins_with_one_pid() {
  set("NCCL_HOSTID", "pod");
  ncclUniqueId id = new_id();
  Gate gate;
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < 3; ++r)
    ranks.push_back(std::make_unique<Child>([&, r] {
      if (unshare(CLONE_NEWPID) != 0) {
        printf("     left out: no pid namespaces here (%s)\n", strerror(errno));
        fflush(stdout);
        gate.wait();
        return take_part(id, 3, r);
      }
      Child twin([&] {
        CHECK_EQ(getpid(), 1);
        gate.wait();
        take_part(id, 3, r);
      });
      CHECK_EQ(twin.wait(), 0);
    }));
  gate.open(3);
  for (auto& rank : ranks) CHECK_EQ(rank->wait(), 0);
}

// Two network namespaces share neither Unix sockets nor, here, a network: one NCCL_HOSTID does not hide it.
void two_network_namespaces() {
  set("NCCL_HOSTID", "pod");
  set("PYNCCL_CPU_INIT_TIMEOUT", "3");
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  Child other([&] {
    if (unshare(CLONE_NEWNET) != 0) {
      printf("     left out: no network namespaces here (%s)\n", strerror(errno));
      fflush(stdout);
      return;
    }
    ncclUniqueId id;
    CHECK_EQ(read(ids[0], &id, sizeof id), ssize_t(sizeof id));
    set("NCCL_SOCKET_IFNAME", "lo");
    ncclComm_t comm = nullptr;
    CHECK(ncclCommInitRank(&comm, 2, id, 1) != ncclSuccess);
    CHECK(strlen(ncclGetLastError(nullptr)) > 20);
  });
  ncclUniqueId id = new_id();
  CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 0)), int(ncclTimeout));
  CHECK(contains(ncclGetLastError(nullptr), "missing rank 1"));
  CHECK_EQ(other.wait(), 0);
}

// Two pods on one machine with a network between them, and one NCCL_HOSTID: no Unix socket leads from one to
// the other, so they count as two hosts.
void two_pods_with_a_network() {
  auto run = [](const std::string& command) {
    return system(("PATH=$PATH:/usr/sbin:/sbin; " + command).c_str()) == 0;
  };
  auto comes_up = [&](const std::string& name) {  // the carrier comes a moment later
    for (int i = 0; i < 100; ++i, pause_for(0.05))
      if (run("ip link show " + name + " | grep -q 'state UP'")) return true;
    return false;
  };
  set("NCCL_HOSTID", "pod");
  set("PYNCCL_CPU_INIT_TIMEOUT", "20");
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  Gate apart, linked, up;
  Child other([&] {
    if (unshare(CLONE_NEWNET) != 0) return;
    apart.open(1);
    linked.wait();
    CHECK(run("ip addr add 10.98.7.2/24 dev pyncclb && ip link set pyncclb up && ip link set lo up"));
    CHECK(comes_up("pyncclb"));
    up.open(1);
    set("NCCL_SOCKET_IFNAME", "pyncclb");
    ncclUniqueId id;
    CHECK_EQ(read(ids[0], &id, sizeof id), ssize_t(sizeof id));
    take_part(id, 2, 1);
  });
  if (unshare(CLONE_NEWNET) != 0)
    return void(printf("     left out: no network namespaces here (%s)\n", strerror(errno)));
  apart.wait();
  bool made = run("ip link add pyncla type veth peer name pyncclb netns " + std::to_string(other.pid()) +
                  " 2>/dev/null && ip addr add 10.98.7.1/24 dev pyncla && ip link set pyncla up");
  if (!made) return void(printf("     left out: no virtual network can be made here\n"));
  linked.open(1);
  CHECK(comes_up("pyncla"));
  up.wait();
  set("NCCL_SOCKET_IFNAME", "pyncla");
  ncclUniqueId id = new_id();
  CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
  take_part(id, 2, 0);
  CHECK_EQ(other.wait(), 0);
}

// ---- listening ----

void ranks_of_one_machine_listen_on_loopback() {
  set("WORLD_SIZE", "2");
  set("LOCAL_WORLD_SIZE", "2");
  start_service();
  for (const sockaddr_in& at : tcp_listeners())
    CHECK_EQ(ntohl(at.sin_addr.s_addr), uint32_t(INADDR_LOOPBACK));
  run_job(2);
}

// ---- several roots ----

// Ranks in processes, each with an id of its own; all ids are known to all.
void spread(int nranks, int nids, int absent,
            const std::function<void(int, ncclResult_t, ncclComm_t)>& check) {
  std::vector<int> to_all;
  int from_all[2];
  CHECK_EQ(pipe(from_all), 0);
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < nranks; ++r) {
    int mine[2];
    CHECK_EQ(pipe(mine), 0);
    to_all.push_back(mine[1]);
    ranks.push_back(std::make_unique<Child>([&, r] {
      struct {
        int rank;
        ncclUniqueId id;
      } own;
      own.rank = r;
      OK(ncclGetUniqueId(&own.id));
      CHECK_EQ(write(from_all[1], &own, sizeof own), ssize_t(sizeof own));
      std::vector<ncclUniqueId> ids(static_cast<size_t>(nranks));
      CHECK(read(mine[0], ids.data(), ids.size() * sizeof ids[0]) > 0);
      if (r == absent) return pause_for(2.5);
      ncclComm_t comm = nullptr;
      ncclResult_t result = ncclCommInitRankScalable(&comm, nranks, r, nids, ids.data(), nullptr);
      check(r, result, comm);
    }));
  }
  std::vector<ncclUniqueId> ids(static_cast<size_t>(nranks));
  for (int r = 0; r < nranks; ++r) {
    struct {
      int rank;
      ncclUniqueId id;
    } one;
    CHECK_EQ(read(from_all[0], &one, sizeof one), ssize_t(sizeof one));
    ids[size_t(one.rank)] = one.id;
  }
  for (int fd : to_all) CHECK(write(fd, ids.data(), ids.size() * sizeof ids[0]) > 0);
  for (auto& rank : ranks) CHECK_EQ(rank->wait(), 0);
}

void several_roots() {
  for (int nids : {1, 2, 3, 5, 7})
    spread(7, nids, -1, [](int rank, ncclResult_t result, ncclComm_t comm) {
      if (result != ncclSuccess) fprintf(stderr, "rank %d: %s\n", rank, ncclGetLastError(nullptr));
      OK(result);
      if (comm) run_rank(comm, 7);
    });
}

void several_roots_name_who_is_missing() {
  set("PYNCCL_CPU_INIT_TIMEOUT", "1");
  for (int absent : {0, 4, 6})
    spread(7, 3, absent, [&](int rank, ncclResult_t result, ncclComm_t) {
      CHECK_EQ(int(result), int(ncclTimeout));
      std::string text = ncclGetLastError(nullptr);
      // The shares are ranks 0 to 2, 3 to 4 and 5 to 6.
      bool named = contains(text, "missing rank " + std::to_string(absent));
      if (!named) fprintf(stderr, "rank %d without %d: %s\n", rank, absent, text.c_str());
      CHECK(named);
    });
}

// No rank of a share comes at all.
void several_roots_name_a_share_that_is_missing() {
  set("PYNCCL_CPU_INIT_TIMEOUT", "1");
  spread(3, 3, 1, [&](int rank, ncclResult_t result, ncclComm_t) {
    CHECK_EQ(int(result), int(ncclTimeout));
    std::string text = ncclGetLastError(nullptr);
    bool named = contains(text, "ranks 1 to 1 at id 1");
    if (!named) fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
    CHECK(named);
  });
}

// ---- waits end ----

void an_abort_ends_a_rendezvous() {
  set("NCCL_COMM_BLOCKING", "0");
  ncclUniqueId id = new_id();
  Child remote([&] {
    ncclComm_t comm = nullptr;
    CHECK_EQ(int(ncclCommInitRank(&comm, 3, id, 1)), int(ncclInProgress));
    pause_for(0.2);
    double began = now();
    ncclCommAbort(comm);
    CHECK(now() - began < 5);
  });
  CHECK_EQ(remote.wait(), 0);
  ncclUniqueId other;
  OK(ncclGetUniqueId(&other));
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 3, other, 0)), int(ncclInProgress));
  pause_for(0.2);
  double began = now();
  ncclCommAbort(comm);
  CHECK(now() - began < 5);
}

// A root that is stopped, or whose host is silent, holds nobody beyond an abort.
void an_abort_ends_a_wait_for_a_stopped_root() {
  set("NCCL_COMM_BLOCKING", "0");
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  Child root([&] {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
    for (;;) pause();
  });
  ncclUniqueId id;
  CHECK_EQ(read(ids[0], &id, sizeof id), ssize_t(sizeof id));
  kill(root.pid(), SIGSTOP);
  for (const char* secret : {"", "with one"}) {
    set("PYNCCL_SECRET", secret);
    ncclComm_t comm = nullptr;
    CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 1)), int(ncclInProgress));
    pause_for(0.2);
    double began = now();
    ncclCommAbort(comm);
    CHECK(now() - began < 5);
  }
}

}  // namespace

int main() {
  const Test tests[] = {TEST(hashes),
                        TEST(idle_connections_over_tcp),
                        TEST(idle_connections_over_the_unix_socket),
                        TEST(another_user_on_the_unix_socket),
                        TEST(one_byte_at_a_time),
                        TEST(nonsense),
                        TEST(a_flood_of_nonsense),
                        TEST(huge_numbers),
                        TEST(a_seat_taken_without_a_secret),
                        TEST(a_stranger_who_does_not_introduce_itself),
                        TEST(with_a_secret_only_who_has_it_gets_in),
                        TEST(a_secret_on_one_side_only_is_said_on_both),
                        TEST(secrets_from_a_file),
                        TEST(a_secret_is_never_shown),
                        TEST(a_public_id_is_warned_of_once),
                        TEST(no_descriptor_left_and_then_some),
                        TEST(no_thread_for_the_service),
                        TEST(too_few_descriptors_for_the_peers),
                        TEST(ranks_as_threads_need_no_descriptors),
                        TEST(many_ranks_in_one_process),
                        TEST(too_many_ranks_are_refused_at_once),
                        TEST(missing_ranks_are_listed_in_few_words),
                        TEST(ids_cost_nothing),
                        TEST(done_ids_cost_nothing),
                        TEST(an_id_book_of_gaps_is_bounded),
                        TEST(twins_with_one_pid),
                        TEST(two_network_namespaces),
                        TEST(two_pods_with_a_network),
                        TEST(ranks_of_one_machine_listen_on_loopback),
                        TEST(several_roots),
                        TEST(several_roots_name_who_is_missing),
                        TEST(several_roots_name_a_share_that_is_missing),
                        TEST(an_abort_ends_a_rendezvous),
                        TEST(an_abort_ends_a_wait_for_a_stopped_root)};
  return run_all(tests, sizeof tests / sizeof *tests);
}
