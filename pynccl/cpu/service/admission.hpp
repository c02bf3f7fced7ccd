// Limits for connections that have not proved yet that they belong to a job: their number in total and per
// source, their duration, and their rate. They bound the resources that unauthenticated peers can use.
#pragma once

#include <vector>

#include "base/net.hpp"

namespace pncpu {

class Admission {
 public:
  // An address or a local user.
  struct Source {
    uint64_t id = 0;
    bool local = false;  // on this machine: shorter limits
    static Source of_user(unsigned uid) { return {uid, true}; }
    static Source of(const Address& address);
  };

  Admission();
  void came(int fd, const Source& source, Deadline now);
  void proved(int fd);                                       // it belongs to a job
  void went(int fd, Deadline now);                           // it ended without a proof
  void starved(Deadline now);                                // accepting failed without a free descriptor
  Deadline starved_since() const { return starved_since_; }  // kForever: not starved

  int overdue(Deadline now) const;           // a connection to drop, or -1
  bool accepts(Deadline now) const;          // whether to accept at all
  Deadline next_change(Deadline now) const;  // when one of these results changes by itself

 private:
  struct Guest {
    int fd;
    Source source;
    Deadline since;
    Deadline grace() const;  // a new connection may still be sending its hello
    Deadline limit() const;
  };
  const Guest* beyond_caps() const;
  double credit(Deadline now) const;

  std::vector<Guest> guests_;  // in the order of arrival; at most one more than the cap
  size_t cap_;
  int scarce_from_;  // descriptors from here on are for the program
  bool scarce_ = false;
  double credit_;
  Deadline credit_at_;
  Deadline rests_until_{};
  Deadline starved_since_ = Deadline::max();
};

}  // namespace pncpu
