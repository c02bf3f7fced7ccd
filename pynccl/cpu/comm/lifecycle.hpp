// Creating, splitting and ending communicators; the exported functions check the arguments first.
#pragma once

#include "comm/comm.hpp"

namespace pncpu {

// The communicator of a handle. any_comm_of() refuses handles that are invalid, destroyed or inherited over a
// fork. comm_of() also calls check_ready(), which refuses communicators that have failed or have a call in
// progress (as ncclCommEnsureReady in NCCL's src/init.cc, except for revoked ones).
ncclResult_t any_comm_of(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);
ncclResult_t comm_of(ncclComm_t handle, const char* function, std::shared_ptr<Comm>* comm);
ncclResult_t check_ready(Comm& comm, const char* function, bool only_takes = false);
// A wrong call sets the state of a non-blocking communicator for good, as in NCCL's src/enqueue.cc
// (ncclEnqueueCheck) and src/init.cc (ncclCommFinalize), at `fail:`.
ncclResult_t spoil_state(Comm& comm, ncclResult_t code);

// The signals of a context, unless config.numRmaSig is set.
constexpr int kSignals = 16;

struct Config {
  int blocking = 1;
  std::string name;
  int contexts = 1, signals = kSignals;  // of one-sided calls
};
ncclResult_t read_config(const ncclConfig_t* config, const char* function, Config* out);

std::shared_ptr<Comm> make_comm(int rank, int nranks, int device, std::shared_ptr<Domain> domain,
                                const Config& config);
ncclResult_t init(const std::shared_ptr<Comm>& comm, const std::vector<Id>& ids, uint64_t ids_hash);
// One thread creates all ranks of a communicator, without a rendezvous.
ncclResult_t init_all(const std::vector<std::shared_ptr<Comm>>& comms);
// The last step of each creation.
ncclResult_t connect(Comm& comm, const Table& table);
// `on`: the creations that a thread runs or begins fail, until a call without `on`.
void interrupt_creations(int thread, bool on);

// For each call of an operation (PYNCCL_CPU_FAULT).
ncclResult_t inject_fault(Comm& comm, const char* function);

ncclResult_t finalize(Comm& comm);

// Destroys or aborts a communicator. An Ending that is dropped before it has run is taken back, and the call
// can be repeated.
class Ending {
 public:
  // Under the issue lock, so that no call is issued behind it.
  Ending(std::shared_ptr<Comm> comm, CommState::End how);
  ~Ending();
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;
  // Only one of several callers ends the communicator. An abort may follow a destruction that has begun, and
  // cuts it short.
  bool may_run() const;
  ncclResult_t run();

 private:
  void cut_short();
  bool await_destruction();
  ncclResult_t leave();
  const std::shared_ptr<Comm> comm_;
  const CommState::End how_;
  bool begun_;
};

// The exchange of data between ranks in a call that changes or derives communicators. If one of them calls
// another function, the communicator fails on all. If one is dropped before it has met, because its call was
// refused, the others hear the calling thread's last error, and the communicator stays as it was.
class Meeting {
 public:
  // Create one in the order of the calls, once it is known which ranks take part: what is refused before that
  // puts the ranks out of step.
  Meeting(std::shared_ptr<Comm> comm, std::vector<int> ranks, const char* function,
          bool after_failure = false);
  ncclResult_t meet(const std::string& mine, std::vector<std::string>* all) const;
  // Fails on all ranks unless all describe their calls in the same words, which follow the function's name:
  // `calls`, in the order of the ranks.
  ncclResult_t agree(const std::vector<std::string>& calls) const;
  const std::vector<int>& ranks() const { return place_->ranks; }
  const std::vector<uint64_t>& tags() const { return place_->tags; }  // of each rank
  static std::vector<int> everyone(const Comm& comm);

 private:
  // Shared by the copies of a Meeting.
  struct Place {
    // What a rank sends: its part, or why it does not come, which may name the rank that failed first.
    enum Part : char { Absent, AbsentFor, Comes };
    ~Place();
    std::string blob(Part part, std::string_view body) const;
    std::shared_ptr<Comm> comm;
    std::vector<int> ranks;
    std::vector<uint64_t> tags;
    const char* function;
    double seconds = creation_limit();
    std::atomic<bool> taken{false};
  };
  std::shared_ptr<Place> place_;
};

}  // namespace pncpu
