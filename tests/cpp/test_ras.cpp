// The RAS server, under strangers and while communicators come and go; tests/tools/test_ras_server.py asks it
// with the client of the Python package.
#include <random>

#include "job.hpp"
#include "ras/report.hpp"
#include "stranger.hpp"

using namespace testing;
using namespace pncpu;

namespace {

sockaddr_in use_ras() { return use_free_address("NCCL_RAS_ADDR"); }

std::string ask(const sockaddr_in& at, const std::string& orders) {
  int fd = connect_patiently(at);
  CHECK_EQ(send(fd, orders.data(), orders.size(), MSG_NOSIGNAL), ssize_t(orders.size()));
  std::string got;
  CHECK(read_to_end(fd, 20, &got));
  close(fd);
  return got;
}

std::string threads_of_this_process() {
  std::string names;
  for (auto& task : fs::directory_iterator("/proc/self/task")) names += read_text(task.path() / "comm");
  return names;
}

TEST_CASE("clients and strangers while jobs run") {
  sockaddr_in at = use_ras();
  Job two(2), three(3);
  ncclComm_t comm = alone();  // before the first client: the server listens while this rank is being created
  Child clients([&] {
    for (int i = 0; i < 8; ++i) {
      std::string format = i % 2 ? "SET FORMAT json\n" : "";
      SAYS(ask(at, "TIMEOUT 10\n" + format + "STATUS\n"), i % 2 ? "\"init_state\": " : "RUNNING");
    }
  });
  Child idle([&] { hold_idle([&] { return connect_tcp(at); }); });
  Child nonsense([&] {
    std::mt19937 random(1);
    for (;;) {
      int fd = connect_patiently(at);
      std::string bytes(random() % 2000, '\0');
      for (char& byte : bytes) byte = char(random());
      send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      close(fd);
      pause_for(0.001);
    }
  });
  pause_for(0.1);
  two.run();
  three.run();
  CHECK_EQ(clients.wait(), 0);
  OK(ncclCommDestroy(comm));
}

TEST_CASE("the server listens while its process has ranks") {
  sockaddr_in at = use_ras();
  ncclComm_t comm = alone();
  SAYS(ask(at, "verbose status\r\n"), "  1         1         1         1         1   RUNNING      OK");
  let_service_rest();
  SAYS(threads_of_this_process(), "pynccl-ras");
  Child child([&] { CHECK(!contains(threads_of_this_process(), "pynccl-ras")); });
  CHECK_EQ(child.wait(), 0);
  OK(ncclCommDestroy(comm));
  int fd = 0;
  for (double until = now() + 10; fd >= 0 && now() < until; pause_for(0.01))
    if (fd = connect_tcp(at); fd >= 0) close(fd);
  CHECK_EQ(fd, -1);
  comm = alone();
  SAYS(ask(at, "STATUS\n"), "RUNNING");
  OK(ncclCommDestroy(comm));
}

TEST_CASE("answers of processes") {
  std::vector<char> said;
  Speaker speaker;
  speaker.process = {1, 2};
  memset(speaker.host_name, '"', sizeof speaker.host_name);
  append(&said, speaker);
  RankState state;
  state.nranks = 2;
  append(&said, state);
  RankPlace place;
  place.process = {1, 2};
  append(&said, place);
  place.process = {3, 4};
  append(&said, place);
  RasProcess whole;
  CHECK(read_process(said.data(), said.size(), &whole));
  RasJob job;
  job.heard(whole);
  job.refused({3, 4});
  SAYS(job.json(), "\"considered_dead\": true");
  CHECK(!contains(job.text(true), "\"\""));
  for (size_t size = 0; size < said.size(); ++size) {
    RasProcess part;
    CHECK_EQ(read_process(said.data(), size, &part), size == sizeof speaker);
  }
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    std::vector<char> bent = said;
    for (int n = 0; n < 3; ++n) bent[random() % bent.size()] = char(random());
    RasProcess process;
    RasJob other;
    if (!read_process(bent.data(), bent.size(), &process)) continue;
    other.heard(whole);
    other.heard(process);
    CHECK(!other.json().empty());
    CHECK(!other.text(i % 2 == 0).empty());
  }
}

}  // namespace
