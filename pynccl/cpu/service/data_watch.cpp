#include "service/data_watch.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

namespace pncpu {

namespace {
constexpr int kBell = -1;
}

std::unique_ptr<DataWatch> DataWatch::create(size_t sockets) {
  Fd epoll = Fd::made_by([] { return epoll_create1(EPOLL_CLOEXEC); });
  Fd bell = Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  epoll_event event{EPOLLIN, {.fd = kBell}};
  if (!epoll || !bell || epoll_ctl(epoll.get(), EPOLL_CTL_ADD, bell.get(), &event) < 0) return nullptr;
  return std::make_unique<DataWatch>(std::make_shared<Socket>(std::move(epoll)), std::move(bell), sockets);
}

// Other threads look meanwhile: they read the socket after its first event.
void DataWatch::add(SocketPtr socket, size_t number) {
  sockets_[number] = socket;
  socket->watch_edges(epoll_->fd(), int(number));
}

bool DataWatch::look() {
  epoll_event events[64];
  int count = epoll_wait(epoll_->fd(), events, 64, 0);
  bool found = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd == kBell) continue;
    sockets_[size_t(events[i].data.fd)]->data_came();
    found = true;
  }
  return found;
}

void DataWatch::await(int64_t ns) {
  pollfd news{epoll_->fd(), POLLIN, 0};
  timespec time{time_t(ns / 1000000000), long(ns % 1000000000)};
  ppoll(&news, 1, &time, nullptr);
}

void DataWatch::ring() {
  rung_.store(true);
  eventfd_write(bell_.get(), 1);
}

void DataWatch::hush() {
  eventfd_t rings;
  eventfd_read(bell_.get(), &rings);
}

}  // namespace pncpu
