// A pipe over a stream socket, which it has from the beginning or gets later.
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "service/socket.hpp"
#include "transport/transport.hpp"

namespace pncpu {
namespace {

constexpr size_t kBuffer = size_t(512) << 10;  // received bytes that no operation has read yet

class TcpPipe final : public Pipe {
 public:
  explicit TcpPipe(std::unique_ptr<SocketSource> source) : source_(std::move(source)) {}
  explicit TcpPipe(SocketPtr socket) { begin(std::move(socket)); }

  bool put(const void* a, size_t a_bytes, const void* b, size_t b_bytes) override {
    if (!flush()) return false;
    unsent_.reserve(a_bytes + b_bytes);  // a failed allocation must not leave half a message
    append(a, a_bytes);
    append(b, b_bytes);
    flush();
    return true;
  }

  size_t write(const void* data, size_t bytes) override {
    return flush() ? send_some(static_cast<const char*>(data), bytes) : 0;
  }

  // Nothing is sent to a peer that has gone.
  bool flush() override {
    while (sent_ < unsent_.size() && !cannot_send_) {
      size_t n = send_some(unsent_.data() + sent_, unsent_.size() - sent_);
      if (n == 0 && !cannot_send_) return false;
      sent_ += n;
    }
    unsent_.clear();
    sent_ = 0;
    return true;
  }

  size_t readable() override {
    fill();
    return filled_ - taken_;
  }

  bool reserve(size_t bytes) override {
    if (bytes <= capacity_ - taken_) return true;
    std::unique_ptr<char[]> larger(new char[std::max(bytes, kBuffer)]);
    memcpy(larger.get(), received_.get() + taken_, filled_ - taken_);
    received_ = std::move(larger);
    capacity_ = std::max(bytes, kBuffer);
    filled_ -= taken_;
    taken_ = 0;
    return true;
  }

  Span peek() override {
    size_t bytes = readable();  // may move the bytes
    return {received_.get() + taken_, bytes};
  }

  void copy_out(size_t skip, void* to, size_t bytes) override {
    memcpy(to, received_.get() + taken_ + skip, bytes);
  }

  void consume(size_t bytes) override { taken_ += bytes; }

  // Reads buffered bytes first, then directly from the socket.
  size_t read(void* to, size_t bytes) override {
    size_t n = std::min(bytes, filled_ - taken_);
    copy_out(0, to, n);
    taken_ += n;
    while (n < bytes) {
      size_t more = receive_some(static_cast<char*>(to) + n, bytes - n);
      if (more == 0) break;
      n += more;
    }
    return n;
  }

  bool more_may_come() override {
    if (!is_open(false)) return !ended_ && source_->may_open();
    socket_->data_came();  // an end that came with the last data is not reported again
    fill();
    return !ended_;
  }
  bool idle() override {
    if (is_open(false)) socket_->data_came();
    return unsent_.empty() && readable() == 0;
  }
  SocketPtr socket() const override { return socket_; }
  void close() override {
    socket_.reset();
    cannot_send_ = ended_ = true;
  }

 private:
  void begin(SocketPtr socket) {
    received_.reset(new char[kBuffer]);
    capacity_ = kBuffer;
    socket_ = std::move(socket);
  }

  bool is_open(bool wanted) {
    if (socket_ || ended_) return socket_ != nullptr;
    bool never = false;
    if (SocketPtr socket = source_->open(wanted, &never)) begin(std::move(socket));
    if (never) cannot_send_ = ended_ = true;
    return socket_ != nullptr;
  }

  void append(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    unsent_.insert(unsent_.end(), from, from + bytes);
  }

  size_t send_some(const char* data, size_t bytes) {
    while (!cannot_send_ && is_open(true)) {
      ssize_t n = send(socket_->fd(), data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n >= 0) return await_room(size_t(n) < bytes), size_t(n);
      if (errno == EAGAIN || errno == EWOULDBLOCK) return await_room(true), 0;
      cannot_send_ = errno != EINTR;
    }
    return 0;
  }

  void await_room(bool wanted) {
    if (wanted != awaits_room_) socket_->await_room(awaits_room_ = wanted);
  }

  size_t receive_some(char* to, size_t bytes) {
    while (!ended_ && is_open(false) && socket_->may_have_data()) {
      socket_->reads();
      ssize_t n = recv(socket_->fd(), to, bytes, MSG_DONTWAIT);
      if (n == ssize_t(bytes) || (n < 0 && errno == EINTR)) socket_->data_came();
      if (n > 0) return size_t(n);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
      ended_ = n == 0 || errno != EINTR;
    }
    return 0;
  }

  void fill() {
    if (!is_open(false)) return;
    if (taken_ == filled_) {
      taken_ = filled_ = 0;
    } else if (taken_ >= capacity_ / 2) {
      memmove(received_.get(), received_.get() + taken_, filled_ - taken_);
      filled_ -= taken_;
      taken_ = 0;
    }
    if (filled_ < capacity_) filled_ += receive_some(received_.get() + filled_, capacity_ - filled_);
  }

  std::unique_ptr<SocketSource> source_;
  SocketPtr socket_;
  bool awaits_room_ = false, cannot_send_ = false,
       ended_ = false;  // separate: data of a peer that has left may still arrive
  std::vector<char> unsent_;
  size_t sent_ = 0;
  std::unique_ptr<char[]> received_;  // bytes [taken_, filled_) are readable
  size_t capacity_ = 0, taken_ = 0, filled_ = 0;
};

}  // namespace

std::unique_ptr<Pipe> tcp_pipe(std::unique_ptr<SocketSource> source) {
  return std::make_unique<TcpPipe>(std::move(source));
}

std::unique_ptr<Pipe> tcp_pipe(SocketPtr socket) { return std::make_unique<TcpPipe>(std::move(socket)); }

}  // namespace pncpu
