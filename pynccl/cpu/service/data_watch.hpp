// The arrival of data on a communicator's sockets. A thread that waits for data looks by itself, which spares
// it the service's thread. It sleeps on the sockets, or, if peers on its host ring its bell, asks the service
// to wake it.
#pragma once

#include <vector>

#include "service/service.hpp"

namespace pncpu {

class DataWatch {
 public:
  DataWatch(SocketPtr epoll, Fd bell, size_t sockets)
      : epoll_(std::move(epoll)), bell_(std::move(bell)), sockets_(sockets) {}
  // nullptr with errno set if there is no descriptor.
  static std::unique_ptr<DataWatch> create(size_t sockets);

  void add(SocketPtr socket, size_t number);
  void start(SinkPtr sink) { watch_data(epoll_, std::move(sink)); }
  void stop() { unwatch(epoll_); }

  // Notes on which sockets data have come since the last look of any thread. Returns whether there are some,
  // or a socket has room again that a pipe waits for.
  bool look();
  // The sink's data_ready() is called once if look() would return true, now or later.
  void arm() { epoll_->rearm(); }
  // For one thread at a time: sleeps until look() would return true, or wake() after `changed`.
  template <class Changed>
  void sleep(int64_t ns, Changed changed) {
    sleeps_.store(true, std::memory_order_seq_cst);
    if (!changed()) await(ns);
    sleeps_.store(false, std::memory_order_relaxed);
    if (rung_.exchange(false)) hush();
  }
  void wake() {
    if (sleeps_.load(std::memory_order_seq_cst)) ring();
  }

 private:
  void await(int64_t ns);
  void ring();
  void hush();

  SocketPtr epoll_;
  Fd bell_;  // an eventfd
  std::atomic<bool> sleeps_{false}, rung_{false};
  std::vector<SocketPtr> sockets_;
};

}  // namespace pncpu
