// A line: the one connection between two processes, shared by all of their communicators. Each frame names
// the rank that it is for and the rank that sent it. Of two processes the one with the greater token dials;
// it also closes the line once no rank of either uses it.
#pragma once

#include <list>
#include <map>

#include "service/socket.hpp"

namespace pncpu {

struct LineHeader {
  CtlHeader frame;
  Token to;
  int32_t from = 0;
  uint32_t pad = 0;
};

// The body of Ctl::Several: this head, the recipients, and the body that each of them gets with its own tag.
struct SeveralHead {
  Ctl kind = Ctl::Exchange;
  uint32_t recipients = 0;
};
struct Recipient {
  Token to;
  uint64_t tag = 0;
};

// A frame for a rank of this process.
struct Post {
  Token to;
  int from;
  CtlHeader header;
  Blob body;
  Token origin = {};  // the process of `from`; none: this one
};
using Posts = std::list<Post>;

class Line {
 public:
  explicit Line(SocketPtr socket, bool dialed = false)
      : socket_(std::move(socket)), dialed_(dialed), pid_(socket_->peer_pid()) {}

  // False: the other process has gone, or has left too much unread.
  bool send(const Token& to, int from, Ctl kind, uint64_t tag, Blob body);
  bool send(const std::vector<Recipient>& to, int from, Ctl kind, const Blob& body);
  bool has_room();                                                        // for a large frame
  Deadline drain(Deadline by, std::chrono::milliseconds patience = {}) {  // as Socket's
    return socket_->drain(by, patience);
  }
  int64_t pid() const { return pid_; }  // of the other process, from the kernel; 0: not visible here

 private:
  friend class Service;  // all that follows is under its mutex
  // A rank of this process with one of the other. What tells of an end is allocated in advance.
  struct Link {
    bool ended = false;  // the other rank has
    Frames bye;          // to the other rank
    Posts end_notice;    // to this rank
  };
  using Links = std::map<Token, std::map<int, Link>>;  // by the token of this rank and the other's number

  Link* find(const Token& mine, int theirs);
  void rest_if_unused();

  const SocketPtr socket_;
  const bool dialed_;
  const int64_t pid_;
  Links links_;
  // Which side has no use for the line: the one that dialed numbers its questions, the other one answers once
  // it has no use for it, either, and then waits for the next line.
  uint64_t questions_ = 0, asked_ = 0;
  bool resting_ = false;
};
using LinePtr = std::shared_ptr<Line>;

}  // namespace pncpu
