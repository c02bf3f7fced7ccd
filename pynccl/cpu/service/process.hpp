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
  enum Stage { Greets, Proves, Joins, Calls, Lines, Notes, Data, Leaves };
  SocketPtr socket;
  SeatPtr seat;
  SinkPtr sink;
  Stage stage = Greets;
  Admission* guest_of = nullptr;  // counts there as unauthenticated
  bool local = false;
  Token process;  // the other one's, of a line, a call or a note
  LinePtr line;
  std::string address;
  Hello hello;
  Token nonce;
  Digest answer;
  LineHeader head;  // a frame's; only its first part unless it came over a line
  size_t got = 0;   // bytes of the hello, the proof or the frame's header
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

  void post(Posts posts) noexcept;
  struct Local {
    SinkPtr sink;
    bool attached = false;
    Table table;        // of its communicator, once it links itself with ranks of other processes
    Posts kept;         // until it is attached
    Posts end_notices;  // for the ranks that hear of its end; allocated in advance
  };
  struct HashToken {
    size_t operator()(const Token& t) const { return size_t(t.a ^ t.b); }
  };
  std::unordered_map<Token, Local, HashToken> locals;
  // A rank is one of a process and a host: ranks of one process may claim different hosts.
  using LineKey = std::pair<Token, bool>;  // the process, and whether over its Unix socket
  std::map<LineKey, LinePtr> lines;
  std::vector<Linked> link_lines(const Token& mine, int rank, const Table& table, std::vector<int>* missing,
                                 int* dials);
  LinePtr open_line_to(const LineKey& key) const {
    auto at = lines.find(key);
    return at == lines.end() || at->second->resting_ ? nullptr : at->second;
  }
  void called(const LineKey& key, SocketPtr socket);
  void end_call(const LineKey& key);
  void leave_lines(const Token& mine);
  bool is_sound(const Local& local, const Post& post) const;  // it comes from a rank of the communicator
  static void give_to(Sink& sink, const Post& post);
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
  bool read_frames(Connection& c);
  bool take_from_line(Connection& c, const Blob& body);
  bool take_several(Connection& c, const Blob& body);
  void take_frame(Connection& c, Post frame);
  bool accept_line(Connection& c);
  void open_line(Connection& c, bool dialed);
  void end_line(Connection& c);
  void lose(Line& line, const Token& mine, int theirs);
  void tell_room(const Line& line);
  void wake_creations();
  bool read_body(Connection& c, size_t* missing);
  void unproved(const Connection& c, const std::string& what);
  void deliver();
  void give(Posts& post);  // of one
  std::unique_ptr<Connection> take(int fd);
  void end(int fd);
  void tidy(Deadline now);
  void turn_ranks_away();
  Fd another_descriptor() const;
  Deadline starved_since() const;

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
  std::set<LineKey> calls_;
  std::mutex posts_mutex_;
  Posts posts_;
  Deadline last_told_{};
  bool lends_spare_ = false;  // to ranks that wait to be accepted
};

}  // namespace pncpu
