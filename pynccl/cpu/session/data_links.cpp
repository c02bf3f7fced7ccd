#include "session/data_links.hpp"

#include <sys/socket.h>

#include "base/threads.hpp"

namespace pncpu {
namespace {

constexpr int kMostDialers = 8;  // threads: a stopped process holds up one

}  // namespace

// Of one pipe.
class DataLinks::Source final : public SocketSource {
 public:
  Source(DataLinks& links, int peer, Channel channel) : links_(links), peer_(peer), channel_(channel) {}
  SocketPtr open(bool wanted, bool* never) override { return links_.open(peer_, channel_, wanted, never); }
  bool may_open() override { return links_.may_open(peer_, channel_); }

 private:
  DataLinks& links_;
  const int peer_;
  const Channel channel_;
};

std::unique_ptr<DataLinks> DataLinks::create(Owner& owner, int rank, int nranks) {
  auto watch = DataWatch::create(size_t(nranks) * kChannels);
  return watch ? std::make_unique<DataLinks>(owner, rank, nranks, std::move(watch)) : nullptr;
}

DataLinks::DataLinks(Owner& owner, int rank, int nranks, std::unique_ptr<DataWatch> watch)
    : owner_(owner), rank_(rank), watch_(std::move(watch)), slots_(size_t(nranks) * kChannels) {}

std::unique_ptr<Pipe> DataLinks::pipe(int peer, Channel channel) {
  return tcp_pipe(std::make_unique<Source>(*this, peer, channel));
}

// Called for each pipe that has no socket yet, often: the lock is taken only if something is to be done.
SocketPtr DataLinks::open(int peer, Channel channel, bool wanted, bool* never) {
  const size_t number = this->number(peer, channel);
  Slot& slot = slots_[number];
  State seen = slot.state.load(std::memory_order_acquire);
  if (seen == State::Dialing || (seen == State::Closed && !wanted)) return nullptr;
  const bool gone = owner_.is_gone(peer);
  std::unique_lock<std::mutex> lock(mutex_);
  seen = slot.state.load();
  if (seen == State::Made) {
    watch_->add(slot.socket, number);
    slot.state.store(State::Taken);
    return std::move(slot.socket);
  }
  if (seen == State::Dialing || (seen == State::Asked && !gone)) return nullptr;
  // A connection that the peer made before its end would have arrived before the news of it.
  if (gone || seen == State::Never) return *never = true, nullptr;
  if (peer < rank_) return dial_soon(lock, peer, channel), nullptr;
  slot.state.store(State::Asked);
  lock.unlock();
  owner_.ask_to_dial(peer, channel);
  return nullptr;
}

bool DataLinks::may_open(int peer, Channel channel) {
  const State state = slots_[number(peer, channel)].state.load();
  return state == State::Dialing || state == State::Made;
}

void DataLinks::arrived(int from, Channel channel, SocketPtr socket) {
  if (from <= rank_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slots_[number(from, channel)];
    const State state = slot.state.load();
    if (state == State::Taken || state == State::Never || stop_.is_set()) return;
    slot.state.store(State::Made, std::memory_order_release);
    // The other rank sends nothing before this: what it has sent is then not lost when it ends. This rank
    // sends nothing before it either, since open() waits for the lock.
    const char accepted = 1;
    send(socket->fd(), &accepted, sizeof accepted, MSG_DONTWAIT | MSG_NOSIGNAL);
    slot.socket = std::move(socket);
  }
  owner_.connected();
}

void DataLinks::asked(int from, Channel channel) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (slots_[number(from, channel)].state.load() == State::Closed) dial_soon(lock, from, channel);
}

void DataLinks::dial_soon(std::unique_lock<std::mutex>& lock, int to, Channel channel) {
  if (stop_.is_set()) return;
  slots_[number(to, channel)].state.store(State::Dialing);
  to_dial_.push_back({to, channel});
  if (dialers_ == kMostDialers) return;
  ++dialers_;
  try {
    start_thread("connections to other hosts", [this, keep = owner_.keep_alive()] { dial_all(); });
  } catch (const std::system_error& error) {
    if (--dialers_) return;  // another thread does it
    to_dial_.clear();
    lock.unlock();
    owner_.cannot_connect(to, error.what(), EAGAIN);
  }
}

void DataLinks::dial_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!to_dial_.empty()) {
    const auto [to, channel] = to_dial_.front();
    to_dial_.pop_front();
    lock.unlock();
    dial(to, channel);
    lock.lock();
  }
  --dialers_;
  idle_.notify_all();
}

void DataLinks::dial(int to, Channel channel) {
  std::string why;
  SocketPtr socket = owner_.dial(to, channel, stop_, &why);
  const int error = errno;
  // Then what is to be sent waits for the error; to a peer that has gone it would be dropped.
  if (!socket && !stop_.is_set() && owner_.cannot_connect(to, why, error)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slots_[number(to, channel)];
    slot.socket = std::move(socket);
    slot.state.store(slot.socket ? State::Made : State::Never, std::memory_order_release);
  }
  owner_.connected();
}

void DataLinks::stop() {
  stop_.set();
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [&] { return dialers_ == 0; });
  for (Slot& slot : slots_) slot.socket.reset();
}

void DataLinks::drop() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Slot& slot : slots_)
    if (slot.socket) shutdown(slot.socket->fd(), SHUT_RDWR);
}

}  // namespace pncpu
