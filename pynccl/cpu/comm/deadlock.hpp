// Deadlocks between ranks, also through several communicators and streams.
//
// A blocked launch (what one group issued) needs something of peers: that they come to a collective, send or
// receive. It asks each of them, by a probe over the control link. A peer that has come to it already drops
// the probe. A peer that will come to it only after something else sends the probe on to those whom that
// waits for: the launch at the head of the stream that the call lies in, or, where the call has not been made
// yet, the launch that the thread which makes this communicator's calls waits for. A probe that comes back to
// the launch that sent it has found a cycle: each of its edges stays until the next one goes. It is then told
// along the same way, so that every rank of the cycle has the error.
//
// That a thread which waits would have made the missing call is an assumption: another thread may still make
// it. Such a cycle is believed only after kAssumedSeconds.
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

// What a rank needs a peer to come to: its collective, send or receive of that number.
struct Need {
  enum Kind : uint32_t { Collective, Send, Receive };
  int peer = 0;
  Kind kind = Collective;
  uint64_t number = 0;
};

// What the calls of one communicator in a launch wait for.
struct Wait {
  std::shared_ptr<Comm> comm;
  bool has_turn = false;  // else it waits for the launch that has
  std::vector<Need> needs;
  std::string doing;  // "rank 0 waits in AllReduce(...) #1"
};

// Of this process.
class Deadlocks {
 public:
  // By whoever runs the launch, while nothing moves; sends probes.
  void blocked(const Task* launch, std::vector<Wait> waits, double seconds);
  void moved(const Task* launch);
  // A control frame from a peer, in the service's thread.
  void probed(Comm& comm, int from, const Blob& body);
  void convicted(Comm& comm, const Blob& body);

  // A thread that waits for a stream without a time-out.
  class Waiter {
   public:
    explicit Waiter(std::shared_ptr<Stream> stream);
    ~Waiter();
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
  };

 private:
  // Where a probe began: a process's launch in one period without a move.
  struct Origin {
    Token process;
    uint64_t period = 0;
    bool operator<(const Origin& o) const {
      return process == o.process ? period < o.period : process < o.process;
    }
  };
  struct Blocked {
    uint64_t period = 0;
    double seconds = 0;
    std::vector<Wait> waits;
    std::map<Origin, uint64_t> seen;  // the round of the last probe from there
  };
  struct Probe;
  struct Message;
  struct Waiting {
    std::shared_ptr<Stream> stream;
    Clock::time_point since;
  };
  const Task* hindrance(Comm& comm, int from, const Need& need, bool* assumed);
  const Task* head_of(std::shared_ptr<Stream> stream) const;
  void spread(Blocked& at, Probe probe, std::vector<Message>* out);
  void deliver(const std::vector<Message>& messages);
  void convict(Probe verdict, Comm& before);
  std::mutex mutex_;
  std::map<const Task*, Blocked> blocked_;
  std::map<int, Waiting> waiting_;  // by thread
  uint64_t periods_ = 0, rounds_ = 0;
  const Token process_ = Token::random();
};

}  // namespace pncpu
