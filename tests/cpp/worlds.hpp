// Communicators whose ranks reach each other's memory in every way that the library knows.
#pragma once

#include "job.hpp"

namespace testing {

struct Way {
  const char* name;
  bool processes, mapped, direct, hosts;
};
inline const Way kWays[] = {
    {"threads", false, true, true, false},      {"threads without direct access", false, false, false, false},
    {"mapped", true, true, false, false},       {"mapped, direct", true, true, true, false},
    {"direct", true, false, true, false},       {"frames", true, false, false, false},
    {"each its host", true, false, true, true},
};

struct World {
  const Way& way;
  int rank, nranks;
  ncclComm_t comm = nullptr;
  int right() const { return (rank + 1) % nranks; }
  int left() const { return (rank + nranks - 1) % nranks; }
};

// Memory that peers can map, or not.
class Memory {
 public:
  Memory(bool mapped, size_t bytes) : mapped_(mapped) {
    if (mapped)
      OK(ncclMemAlloc(&at_, bytes));
    else
      at_ = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    memset(at_, 0, bytes);
  }
  ~Memory() {
    if (mapped_)
      OK(ncclMemFree(at_));
    else
      free(at_);
  }
  Memory(const Memory&) = delete;
  float* floats() const { return static_cast<float*>(at_); }

 private:
  const bool mapped_;
  void* at_ = nullptr;
};

inline void with_world(const Way& way, int nranks, const std::function<void(World&)>& body) {
  const ncclUniqueId id = new_id();
  set("PYNCCL_CPU_DIRECT", way.direct ? "1" : "0");
  auto rank = [&](int r) {
    if (way.hosts) set("NCCL_HOSTID", std::to_string(r).c_str());
    World world{way, r, nranks};
    OK(ncclCommInitRank(&world.comm, nranks, id, r));
    if (!world.comm) return;
    body(world);
    OK(ncclCommFinalize(world.comm));
    OK(ncclCommDestroy(world.comm));
  };
  way.processes ? as_processes(nranks, rank) : as_threads(nranks, rank);
}

// Runs a body in 3 processes, in which rank 1 is killed, and the last call of the others fails.
inline void with_a_victim(const Way& way, const std::function<void(World&)>& body) {
  INFO(std::string(way.name));
  set("PYNCCL_CPU_DIRECT", way.direct ? "1" : "0");
  const ncclUniqueId id = new_id();
  as_processes_with(1, 3, [&](int rank) {
    if (way.hosts) set("NCCL_HOSTID", std::to_string(rank).c_str());
    World w{way, rank, 3};
    OK(ncclCommInitRank(&w.comm, 3, id, rank));
    body(w);
    SAYS(last_error(w.comm), "rank 1 (pid");
    OK(ncclCommAbort(w.comm));
  });
}

inline void on_every_way(int nranks, const std::function<void(World&)>& body) {
  for (const Way& way : kWays) {
    INFO(std::string(way.name));
    printf("     %s\n", way.name);
    with_world(way, nranks, body);
  }
}

inline ncclResult_t await(const World& w, int peer, int count = 1, int signal = 0) {
  ncclWaitSignalDesc_t d{count, peer, signal, 0};
  return ncclWaitSignal(1, &d, w.comm, nullptr);
}

inline size_t wrong(const float* got, size_t count, float want) {
  size_t n = 0;
  for (size_t i = 0; i < count; ++i) n += got[i] != want;
  return n;
}

}  // namespace testing
