// Ranks in containers: namespaces in which processes, or networks, look alike. Each test says in a line what
// it leaves out where it may not make them.
#include <sched.h>

#include "job.hpp"

using namespace testing;
using namespace pncpu;

namespace {

// Each rank is process 1 of its own namespace, and their memory looks alike.
TEST_CASE("twins with one pid") {
  set("NCCL_HOSTID", "pod");
  ncclUniqueId id = settled_id();
  Gate gate;
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < 3; ++r)
    ranks.push_back(std::make_unique<Child>([&, r] {
      if (unshare(CLONE_NEWPID) != 0) {
        MESSAGE("left out: no pid namespaces here (", std::string(strerror(errno)), ")");
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
TEST_CASE("two network namespaces") {
  set("NCCL_HOSTID", "pod");
  set("PYNCCL_CPU_INIT_TIMEOUT", "3");
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  Child other([&] {
    if (unshare(CLONE_NEWNET) != 0) {
      MESSAGE("left out: no network namespaces here (", std::string(strerror(errno)), ")");
      return;
    }
    ncclUniqueId id;
    CHECK_EQ(read(ids[0], &id, sizeof id), ssize_t(sizeof id));
    set("NCCL_SOCKET_IFNAME", "lo");
    ncclComm_t comm = nullptr;
    CHECK(ncclCommInitRank(&comm, 2, id, 1) != ncclSuccess);
    CHECK(strlen(ncclGetLastError(nullptr)) > 20);
  });
  ncclUniqueId id = settled_id();
  CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 0)), int(ncclTimeout));
  CHECK(contains(ncclGetLastError(nullptr), "missing rank 1"));
  CHECK_EQ(other.wait(), 0);
}

// Two pods on one machine with a network between them, and one NCCL_HOSTID: no Unix socket leads from one to
// the other, so they count as two hosts.
TEST_CASE("two pods with a network") {
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
  if (unshare(CLONE_NEWNET) != 0) {
    MESSAGE("left out: no network namespaces here (", std::string(strerror(errno)), ")");
    return;
  }
  apart.wait();
  bool made = run("ip link add pyncla type veth peer name pyncclb netns " + std::to_string(other.pid()) +
                  " 2>/dev/null && ip addr add 10.98.7.1/24 dev pyncla && ip link set pyncla up");
  if (!made) {
    MESSAGE("left out: no virtual network can be made here");
    return;
  }
  linked.open(1);
  CHECK(comes_up("pyncla"));
  up.wait();
  set("NCCL_SOCKET_IFNAME", "pyncla");
  ncclUniqueId id = settled_id();
  CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
  take_part(id, 2, 0);
  CHECK_EQ(other.wait(), 0);
}

const AtOnce kAtOnce(3);

}  // namespace
