// Deadlocks between ranks, also through several communicators and streams.
//
// A blocked launch (the calls of one group) needs its peers to start a collective, send or receive. It sends
// them a probe over the line; of many peers each round asks others. A peer that has started the operation
// drops the probe. A peer that must finish another launch first forwards the probe to the peers that this
// launch waits for. That launch is the one at the head of the call's stream. If the call has not been made
// yet, it is the launch for which the communicator's calling thread waits. A probe that returns to the launch
// that sent it has found a cycle. A verdict then travels along the same path, so that every rank of the cycle
// gets the error.
//
// A call that meets the other ranks, such as ncclCommSplit, is a blocked launch as well. It needs its peers
// to make the same call.
//
// If one thread has made all calls of a communicator, it is assumed to make the missing call too. Another
// thread may make it, so a cycle with such an edge counts only after kAssumedSeconds.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "session/session.hpp"
#include "streams/stream.hpp"

namespace pncpu {

struct Comm;

// An operation that a peer must start: its collective, send, receive, signal or meeting with this number.
struct Need {
  enum Kind : uint32_t { Collective, Send, Receive, Signal, Meeting };
  int peer = 0;
  Kind kind = Collective;
  uint64_t number = 0;
};

// What the calls of one communicator in a launch wait for.
struct Wait {
  std::shared_ptr<Comm> comm;
  bool has_turn = false;  // false: it waits for the launch that has the turn
  std::vector<Need> needs;
  std::string doing;  // "rank 0 waits in AllReduce(...) #1"
};

// One per process.
class Deadlocks {
 public:
  // The address of a launch or of a meeting.
  using Blocker = const void*;
  // The thread that runs a launch calls this while there is no progress; sends probes.
  void blocked(Blocker launch, std::vector<Wait> waits, double seconds);
  // The thread that waits in a meeting calls this.
  void meets(Blocker meeting, Wait wait, double seconds);
  void moved(Blocker blocker);
  bool awaits(const Comm& comm, int peer);
  // "rank 0 waits in AllReduce(...) #1 for rank 2", or "" if no call has waited for long.
  std::string doing(const Comm& comm);
  // Control frames from a peer, in the service's thread.
  void probed(Comm& comm, int from, const Blob& body);
  void cycle_found(Comm& comm, const Blob& body);

  // A thread that waits for a stream without a time-out, unless its caller has one.
  class Waiter {
   public:
    explicit Waiter(const std::shared_ptr<Stream>& stream);
    ~Waiter();
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    // The thread goes on with the wait soon, unless it is interrupted.
    void pause() { paused_ = true; }

   private:
    int thread_ = 0;
    bool paused_ = false;
  };

 private:
  // The source of a probe: a launch of a process, during one period without progress.
  struct Origin {
    Token process;
    uint64_t period = 0;
    bool operator<(const Origin& o) const {
      return process == o.process ? period < o.period : process < o.process;
    }
  };
  struct Blocked {
    uint64_t period = 0, rounds = 0;
    double seconds = 0;
    bool meets = false;  // false: a launch
    int thread = 0;      // that waits in the meeting, without a limit; else 0
    std::vector<Wait> waits;
    std::map<Origin, uint64_t> seen;  // the round of the last probe from there
  };
  struct Probe;
  struct Message;
  struct Waiting {
    std::weak_ptr<Stream> stream;
    Clock::time_point since, until;  // kForever, or soon after a pause
  };
  void look(Blocker blocker, std::vector<Wait> waits, double seconds, bool meets);
  Blocker blocker_of(Comm& comm, int from, Probe* probe);
  Blocker head_of(std::shared_ptr<Stream> stream) const;
  void spread(Blocked& at, Probe probe, std::vector<Message>* out);
  void deliver(const std::vector<Message>& messages);
  void fail_cycle(Probe verdict, Comm& before);
  std::mutex mutex_;
  std::map<Blocker, Blocked> blocked_;
  std::map<int, Waiting> waiting_;  // by thread
  uint64_t periods_ = 0;
  const Token process_ = Token::random();
};

}  // namespace pncpu
