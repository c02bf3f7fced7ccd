// Asks all processes of a job at once how their ranks are, and never blocks.
#pragma once

#include <poll.h>

#include <list>
#include <set>
#include <string>
#include <vector>

#include "ras/report.hpp"
#include "service/process.hpp"

namespace pncpu {

class Collection {
 public:
  // Begins with what this process says, and asks every process of which it hears.
  Collection(Service& service, Deadline now);
  const Deadline began;
  bool done() const { return questions_.empty(); }
  Deadline next(Deadline now);  // when proceed() must be called without an event
  void poll_for(std::vector<pollfd>* entries) const;
  void proceed(const pollfd& entry);
  void tick(Deadline now);  // begins questions, as many as descriptors allow
  RasJob job;

 private:
  enum class Stage { Waits, Connects, Proves, Answers };
  struct Question {
    RankPlace to;
    Stage stage = Stage::Waits;
    Deadline retry{};
    Fd fd;
    Hello hello;
    std::vector<char> got;
    size_t wanted = 0;
  };
  enum class Outcome { Goes, Ended, Refused };

  void hear(const char* data, size_t size);
  Outcome begin(Question& q, Deadline now);
  Outcome greet(Question& q);
  Outcome step(Question& q);
  Outcome read(Question& q);
  Outcome advance(Question& q);
  void settle(std::list<Question>::iterator q, Outcome outcome);

  const uint64_t host_;
  const std::string secret_;
  const size_t most_;  // questions with a descriptor
  size_t open_ = 0;
  std::list<Question> questions_;
  std::set<Token> known_;
};

}  // namespace pncpu
