// The answers to clients, made of what the processes of a job say, in the formats of NCCL's RAS
// (src/ras/client_support.cc).
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "service/state.hpp"

namespace pncpu {

// What a process said; the communicators of several are merged by their hash.
struct RasProcess {
  struct Rank {
    RankState state;
    std::vector<RankPlace> places;  // of all ranks of its communicator
  };
  Speaker speaker;
  std::vector<Rank> ranks;
};
// False for anything that no Service::describe() says.
bool read_process(const char* data, size_t size, RasProcess* process);

// The state of all processes that could be asked.
class RasJob {
 public:
  void heard(const RasProcess& process);
  void refused(const Token& process) { refused_.insert(process); }  // nobody listens there any more
  double seconds = 0;
  std::string json() const;
  std::string text(bool verbose) const;

  struct Place {
    Token process;
    int64_t pid = 0;
    int device = 0;
    bool left = false, dead = false;  // as a peer has noticed
    std::string host;
  };
  struct Comm {
    uint64_t hash = 0, secondary[2] = {0, 0};
    int size = 0;
    std::map<int, RankState> ranks;
    std::map<int, Place> places;  // of all ranks
  };

 private:
  struct Summary;
  struct Process {
    std::string host;
    int64_t pid = 0;
    std::set<int> devices;
  };
  bool responded(const Place& place) const { return heard_.count(place.process) != 0; }
  bool is_dead(const Place& place) const;
  bool is_silent(const Place& place) const { return !responded(place) && !place.left && !is_dead(place); }
  int timeouts() const;
  std::map<Token, Process> processes() const;
  std::vector<Summary> summaries() const;
  std::string job_summary() const;
  std::string process_errors(bool verbose) const;
  void mismatches(const Summary& one, const std::string& name, bool verbose, std::string* out) const;
  std::map<Token, Process> heard_;
  std::set<Token> refused_;
  std::map<uint64_t, Comm> comms_;
};

}  // namespace pncpu
