// What strangers can do to a process that uses the CPU library, and what they cannot: each test is a victim
// that runs a job while processes which know nothing, or only what is public, try to take its descriptors,
// memory, processor time, or the place of a rank. Each test says in a line what it leaves out without root.
#include <fcntl.h>
#include <grp.h>

#include "job.hpp"
#include "stranger.hpp"

using namespace testing;
using namespace pncpu;

namespace {

// ---- who sends nothing, little, or nonsense ----

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
  CHECK(most <= quiet.descriptors + 70);
  CHECK(share < 0.25);
  two.run();
  three.run();
  CHECK(!quiet.grew_beyond(64 * 1024));
}

TEST_CASE("idle connections over tcp") {
  limit_descriptors(400);
  Job two(2), three(3);
  start_service();
  Gauge quiet;
  sockaddr_in at = tcp_listeners()[0];
  Child a([&] { hold_idle([&] { return connect_tcp(at); }); });
  pause_for(0.3);
  endures(quiet, two, three);
}

TEST_CASE("idle connections over the unix socket") {
  limit_descriptors(400);
  Job two(2), three(3);
  start_service();
  Gauge quiet;
  std::string name = unix_listener();
  Child a([&] { hold_idle([&] { return connect_unix_name(name); }); });
  pause_for(0.3);
  endures(quiet, two, three);
}

TEST_CASE("another user on the unix socket") {
  if (geteuid() != 0) {
    MESSAGE("left out: only root can become another user");
    return;
  }
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

TEST_CASE("one byte at a time") {
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

TEST_CASE("nonsense") {
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

TEST_CASE("a flood of nonsense") {
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

TEST_CASE("no descriptor left and then some") {
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

TEST_CASE("ranks of one machine listen on loopback") {
  set("WORLD_SIZE", "2");
  set("LOCAL_WORLD_SIZE", "2");
  start_service();
  for (const sockaddr_in& at : tcp_listeners())
    CHECK_EQ(ntohl(at.sin_addr.s_addr), uint32_t(INADDR_LOOPBACK));
  run_job(2);
}

// ---- who knows the public id ----

// Each of these in its turn, while rank 0 waits for rank 1.
TEST_CASE("huge numbers") {
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
  ncclUniqueId id = settled_id();
  take_part(id, 2, 0);
  CHECK_EQ(evil.wait(), 0);
  CHECK_EQ(other.wait(), 0);
  CHECK(!gauge.grew_beyond(48 * 1024));
}

// A stranger takes rank 1's seat first. Rank 1 comes, and the job ends, saying so.
TEST_CASE("a seat taken without a secret") {
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
TEST_CASE("a stranger who does not introduce itself") {
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
  ncclUniqueId id = settled_id();
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 0)), int(ncclTimeout));
  CHECK(contains(ncclGetLastError(nullptr), "rank 1 (on evil, 127.0.0.1:"));
  CHECK_EQ(evil.wait(), 0);
}

TEST_CASE("a public id is warned of once") {
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

const AtOnce kAtOnce(3);

}  // namespace
