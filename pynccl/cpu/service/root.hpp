// The root of a unique id: gathers the ranks' introductions, checks that they agree, and answers all of them.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "service/service.hpp"

namespace pncpu {

// Used under the service's lock only.
class RootTable {
 public:
  void open(const Token& token, bool reusable);
  bool known(const Token& token) const { return roots_.count(token) != 0; }
  // False ends the connection.
  bool joined(const Token& token, const Join& join, const SocketPtr& socket);
  void left(const Token& token, const SocketPtr& socket);
  // Whether a rank has joined and got no answer yet.
  bool waits(const Token& token, const SocketPtr& socket) const;
  void expire(Deadline now);

 private:
  struct Member {
    Join join;
    SocketPtr socket;
  };
  struct Root {
    bool reusable = false;
    std::string over;  // why nobody can join any more
    ncclResult_t over_code = ncclInvalidUsage;
    Deadline deadline = kForever;
    std::vector<Member> members;
  };
  static void answer(const SocketPtr& socket, ncclResult_t result, const void* body, size_t bytes);
  void end(Root& root, ncclResult_t result, const std::string& text);
  void complete(Root& root);
  std::map<Token, Root> roots_;
};

}  // namespace pncpu
