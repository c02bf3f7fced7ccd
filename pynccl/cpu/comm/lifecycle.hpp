// Creating, splitting and ending communicators; the exported functions check the arguments first.
#pragma once

#include "comm/comm.hpp"

namespace pncpu {

// The communicator behind a handle that calls may use now, or nullptr after fail(): invented, destroyed,
// inherited over a fork, and, with `ready`, still being created or polled for.
std::shared_ptr<Comm> comm_of(ncclComm_t handle, const char* function, bool ready = true);

struct Config {
  int blocking = 1;
  std::string name;
};
ncclResult_t read_config(const ncclConfig_t* config, const char* function, Config* out);

std::shared_ptr<Comm> make_comm(int rank, int nranks, int device, std::shared_ptr<Domain> domain,
                                const Config& config);
void publish(const std::shared_ptr<Comm>& comm, ncclComm_t* out);
void withdraw(const std::shared_ptr<Comm>& comm, ncclComm_t* out);
// A creation that will not run after all: who ends the communicator need not wait for it.
void cancel_creation(Comm& comm, const char* why);

ncclResult_t init(const std::shared_ptr<Comm>& comm, const std::vector<Id>& ids, uint64_t ids_hash);
// All ranks of a communicator, by one thread and without a rendezvous.
ncclResult_t init_all(const std::vector<std::shared_ptr<Comm>>& comms);
// The last step of each creation.
ncclResult_t connect(Comm& comm, const Table& table);
// Lets the creations fail that a thread waits in or begins, until it is taken back.
void interrupt_creations(int thread, bool on);

ncclResult_t finalize(Comm& comm);
// The caller has begun the end (Standing::begin_end).
ncclResult_t destroy(const std::shared_ptr<Comm>& comm);
ncclResult_t abort(const std::shared_ptr<Comm>& comm);

// What ranks of a communicator tell each other in a call that changes or derives communicators. Another
// function called by one of them fails the communicator on all.
class Meeting {
 public:
  // In the order of the calls.
  Meeting(std::shared_ptr<Comm> comm, std::vector<int> ranks, const char* function);
  ncclResult_t meet(const std::string& mine, std::vector<std::string>* all) const;
  const std::vector<int>& ranks() const { return ranks_; }
  static std::vector<int> everyone(const Comm& comm);

 private:
  std::shared_ptr<Comm> comm_;
  std::vector<int> ranks_;
  std::vector<uint64_t> tags_;
  const char* function_;
};

}  // namespace pncpu
