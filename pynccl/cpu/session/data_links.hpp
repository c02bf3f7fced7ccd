// The data connections of a rank to ranks on other hosts, one for each channel. Each is made when the first
// of the two sends over it. The higher rank connects; the lower one asks for that (Ctl::Dial).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "service/data_watch.hpp"
#include "service/stop.hpp"
#include "transport/transport.hpp"

namespace pncpu {

class DataLinks {
 public:
  // A view of the session.
  class Owner {
   public:
    // Connects to a rank; nullptr with errno and *why set on failure.
    virtual SocketPtr dial(int to, Channel channel, Stop& stop, std::string* why) = 0;
    virtual void ask_to_dial(int to, Channel channel) = 0;
    virtual bool is_gone(int peer) = 0;
    // The communicator fails, unless the other rank has ended. Returns whether it has failed.
    virtual bool cannot_connect(int to, const std::string& why, int error) = 0;
    virtual void connected() = 0;      // wakes the threads that wait for data; also if none will come
    virtual SinkPtr keep_alive() = 0;  // while a thread dials

   protected:
    ~Owner() = default;
  };

  // nullptr with errno set if there is no descriptor.
  static std::unique_ptr<DataLinks> create(Owner& owner, int rank, int nranks);
  DataLinks(Owner& owner, int rank, int nranks, std::unique_ptr<DataWatch> watch);

  std::unique_ptr<Pipe> pipe(int peer, Channel channel);
  DataWatch& watch() { return *watch_; }

  void arrived(int from, Channel channel, SocketPtr socket);  // a connection that a higher rank has made
  void asked(int from, Channel channel);                      // by a lower rank, to connect
  void stop();                                                // no connection is made any more
  void drop();                                                // fault injection: all end

 private:
  enum class State : uint8_t { Closed, Asked, Dialing, Made, Taken, Never };
  struct Slot {
    std::atomic<State> state{State::Closed};
    SocketPtr socket;
  };
  class Source;

  size_t number(int peer, Channel channel) const { return size_t(peer) * kChannels + size_t(channel); }
  SocketPtr open(int peer, Channel channel, bool wanted, bool* never);
  bool may_open(int peer, Channel channel);
  void dial_soon(std::unique_lock<std::mutex>& lock, int to, Channel channel);
  void dial_all();
  void dial(int to, Channel channel);

  Owner& owner_;
  const int rank_;
  const std::unique_ptr<DataWatch> watch_;
  Stop stop_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<Slot> slots_;
  std::deque<std::pair<int, Channel>> to_dial_;
  int dialers_ = 0;  // threads
};

}  // namespace pncpu
