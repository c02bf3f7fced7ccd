// The arrival of data on a communicator's sockets. A thread that waits for data looks by itself, which spares
// it the service's thread; before it sleeps, it asks the service to wake it.
#pragma once

#include <vector>

#include "service/service.hpp"

namespace pncpu {

class DataWatch {
 public:
  explicit DataWatch(SocketPtr epoll) : epoll_(std::move(epoll)) {}
  // nullptr with errno set if there is no descriptor.
  static std::unique_ptr<DataWatch> create();

  void add(SocketPtr socket);
  void start(SinkPtr sink) { watch_data(epoll_, std::move(sink)); }
  void stop() { unwatch(epoll_); }

  // Notes on which sockets data have come since the last look of any thread. Returns whether there are some,
  // or a socket has room again that a pipe waits for.
  bool look();
  // The sink's data_ready() is called once if look() would return true, now or later.
  void arm() { epoll_->rearm(); }

 private:
  SocketPtr epoll_;
  std::vector<SocketPtr> sockets_;
};

}  // namespace pncpu
