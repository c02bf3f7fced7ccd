#include "service/data_watch.hpp"

#include <sys/epoll.h>

namespace pncpu {

std::unique_ptr<DataWatch> DataWatch::create() {
  Fd epoll = Fd::made_by([] { return epoll_create1(EPOLL_CLOEXEC); });
  if (!epoll) return nullptr;
  return std::make_unique<DataWatch>(std::make_shared<Socket>(std::move(epoll)));
}

void DataWatch::add(SocketPtr socket) {
  sockets_.push_back(socket);
  socket->watch_edges(epoll_->fd(), int(sockets_.size()) - 1);
}

bool DataWatch::look() {
  epoll_event events[64];
  int count = epoll_wait(epoll_->fd(), events, 64, 0);
  for (int i = 0; i < count; ++i) sockets_[size_t(events[i].data.fd)]->data_came();
  return count > 0;
}

}  // namespace pncpu
