// Creating, splitting and ending communicators; abi_comm.cpp checks the arguments first.
#pragma once

#include "streams/group.hpp"

namespace pncpu {

// The communicator behind a handle, or nullptr after fail(): invented, destroyed, inherited over a fork, and,
// with `ready`, still being created or finalized.
Comm* comm_of(ncclComm_t handle, const char* function, bool ready = true);

struct Config {
  int blocking = 1;
  std::string name;
};
ncclResult_t read_config(const ncclConfig_t* config, const char* function, Config* out);

std::shared_ptr<Comm> make_comm(int rank, int nranks, int device, int copy, const Config& config);
ncclResult_t publish(const std::shared_ptr<Comm>& comm, ncclComm_t* out);
// Ends the handle; the one caller that gets the communicator ends the communicator.
std::shared_ptr<Comm> take_ownership(ncclComm_t handle);
void withdraw(const std::shared_ptr<Comm>& comm, ncclComm_t* out);

ncclResult_t init(const std::shared_ptr<Comm>& comm, const std::vector<Id>& ids, uint64_t ids_hash);
// All ranks of a communicator, by one thread and without a rendezvous.
ncclResult_t init_all(const std::vector<std::shared_ptr<Comm>>& comms);
// The last step of each creation.
ncclResult_t connect(Comm& comm, const Table& table);
// Lets the creations fail that a thread waits in or begins, until it is taken back.
void interrupt_creations(int thread, bool on);
ncclResult_t finalize(Comm& comm);
ncclResult_t destroy(const std::shared_ptr<Comm>& comm);
ncclResult_t abort(const std::shared_ptr<Comm>& comm);
// The ranks of the parent that form the child are known only after an exchange among `ranks`.
ncclResult_t derive(Comm& parent, const std::vector<int>& ranks, uint64_t tag, const std::string& mine,
                    const char* function, std::vector<std::string>* all);

}  // namespace pncpu
