// Which connections may stay that have not shown yet that they belong to a job: how many in all and from one
// source, for how long, and at what rate they may come. What strangers can take of this process is bounded
// by the figures here.
#pragma once

#include <vector>

#include "base/net.hpp"

namespace pncpu {

class Admission {
 public:
  // An address or a local user.
  struct Source {
    uint64_t id = 0;
    bool local = false;  // this machine's: what is slow there is not the network
    static Source of_user(unsigned uid) { return {uid, true}; }
    static Source of(const Address& address);
  };

  Admission();
  void came(int fd, const Source& source, Deadline now);
  void proved(int fd);                                       // it belongs to a job
  void went(int fd, Deadline now);                           // it did not show that it does
  void starved(Deadline now);                                // there was no descriptor to accept it with
  Deadline starved_since() const { return starved_since_; }  // kForever: it is not

  int overdue(Deadline now) const;           // a connection to drop, or -1
  bool accepts(Deadline now) const;          // whether to accept at all
  Deadline next_change(Deadline now) const;  // when one of these answers changes on its own

 private:
  struct Guest {
    int fd;
    Source source;
    Deadline since;
    Deadline grace() const;  // who has just come may still be speaking
    Deadline limit() const;
  };
  const Guest* beyond_caps() const;
  double credit(Deadline now) const;

  std::vector<Guest> guests_;  // in the order in which they came, never more than the cap and one
  size_t cap_;
  int scarce_from_;  // descriptors from here on are for the program
  bool scarce_ = false;
  double credit_;
  Deadline credit_at_;
  Deadline rests_until_{};
  Deadline starved_since_ = Deadline::max();
};

}  // namespace pncpu
