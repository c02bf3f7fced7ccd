// A connection of a client to the RAS server: the commands of NCCL's protocol (src/ras/client_support.cc).
#pragma once

#include <poll.h>

#include <memory>
#include <string>

#include "base/core.hpp"

namespace pncpu {

class RasClient {
 public:
  enum class Stage { Orders, Waits, Answered, Gone };

  RasClient(Fd fd, Deadline now);
  int fd() const { return fd_.get(); }
  Stage stage() const { return stage_; }
  Deadline began() const { return began_; }
  Deadline deadline() const { return deadline_; }  // of an answer while it waits, else of the connection
  bool speaks() const { return speaks_; }          // it has sent a valid command
  bool wants_json() const { return json_; }
  bool wants_all() const { return verbose_; }
  short events() const;
  void proceed(short revents, Deadline now);
  void wait_until(Deadline deadline) { deadline_ = deadline; }
  std::chrono::seconds patience() const { return patience_; }  // that it asked for
  void answer(std::shared_ptr<const std::string> text, Deadline now);
  void drop() { stage_ = Stage::Gone; }

 private:
  void read();
  void obey(const std::string& line);
  void say(const std::string& text);
  void write();

  Fd fd_;
  Stage stage_ = Stage::Orders;
  Deadline began_, deadline_;
  std::chrono::seconds patience_{5};
  bool json_ = false, verbose_ = false, ended_ = false, speaks_ = false;  // ended_: it sends no more
  std::string in_, out_;
  std::shared_ptr<const std::string> answer_;
  size_t sent_ = 0;  // of the answer
};

}  // namespace pncpu
