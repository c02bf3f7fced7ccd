// The service itself, for the files of this folder.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "service/admission.hpp"
#include "service/root.hpp"
#include "service/service.hpp"

namespace pncpu {

struct Connection {
  enum Stage { Greets, Proves, Joins, Control, Data, Leaves };
  SocketPtr socket;
  SeatPtr seat;
  SinkPtr sink;
  Stage stage = Greets;
  Admission* guest_of = nullptr;  // counts there as unauthenticated
  int rank = -1;
  std::string address;
  Hello hello;
  Token nonce;
  Digest answer;
  CtlHeader header;
  size_t got = 0;  // bytes of the hello, the proof or the frame's header
  std::vector<char> body;
  Deadline leaves_by = kForever;
};

class Service {
 public:
  // This process's service, started at the first use. nullptr after fail().
  static Service* get(const char* needed_by);

  std::recursive_mutex mutex;  // sinks are called under it and may call back
  RootTable roots;
  Endpoint endpoint;
  Token unix_name, process;
  std::string secret;

  ncclResult_t read_secret();  // reads it again: the environment may have changed
  bool listen(Address address, std::string* why);
  void watch(const SocketPtr& socket, std::unique_ptr<Connection> connection, uint32_t events);
  void drop(const SocketPtr& socket);     // the connection has ended
  void release(const SocketPtr& socket);  // stops watching it
  void finish(const SocketPtr& socket);   // drops it after everything is sent
  void wake();

  struct Post {
    Token to;
    int from;
    CtlHeader header;
    Blob body;
  };
  using Posts = std::list<Post>;
  void post(Posts posts) noexcept;
  struct Local {
    SinkPtr sink;
    bool attached = false;
    Posts kept;         // until it is attached
    Posts end_notices;  // for the ranks that hear of its end; allocated in advance
  };
  struct HashToken {
    size_t operator()(const Token& t) const { return size_t(t.a ^ t.b); }
  };
  std::unordered_map<Token, Local, HashToken> locals;
  bool starved();
  // What this process says of its ranks; at most kMaxFrame bytes.
  std::vector<char> describe();
  // Called under the mutex when a rank begins or ends.
  std::function<void()> ranks_changed;
  // A spare descriptor for telling peers that no other is left.
  Fd spare;
  void hold_spare();

 private:
  // Separate limits for network and local connections.
  struct Gate {
    Admission admission;
    bool resting = false;
  };

  bool start(std::string* why);
  void run();
  void tend(Gate& gate, Deadline now);
  void accept_from(int listener, Gate& gate);
  bool admit(Fd fd, Admission& admission, const Address* from);
  void attend(int fd, uint32_t events);  // serves, or drops the connection for lack of memory
  void serve(int fd, uint32_t events);
  bool read(Connection& c);
  bool fill(Connection& c, void* into, size_t size);
  bool greeted(Connection& c);
  bool proved(Connection& c);
  bool known(Connection& c);
  void is_no_stranger(Connection& c);
  bool read_frames(Connection& c, bool joins);
  bool read_body(Connection& c, size_t* missing);
  void unproved(const Connection& c, const std::string& what);
  void deliver();
  void give(Posts& post);  // of one
  std::unique_ptr<Connection> take(int fd);
  void end(int fd);
  void tidy(Deadline now);

  struct Listener {
    Fd fd;
    Gate* gate;
    std::string asked;  // the address it was asked for
  };
  Fd epoll_, wake_;
  std::vector<Listener> listeners_;
  Gate network_, local_;
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;
  std::set<std::pair<Deadline, int>> leaving_;  // answered, with the deadline for dropping them
  std::vector<SocketPtr> finished_;
  std::mutex posts_mutex_;
  Posts posts_;
  Deadline last_told_{};
};

}  // namespace pncpu
