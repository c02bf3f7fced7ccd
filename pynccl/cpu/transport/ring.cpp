// A pipe over two rings in shared memory.
#include <algorithm>

#include "transport/transport.hpp"

namespace pncpu {
namespace {

class RingPipe final : public Pipe {
 public:
  RingPipe(Ring out, Ring in, size_t bytes) : out_(out), in_(in), size_(bytes) {}

  bool put(const void* a, size_t a_bytes, const void* b, size_t b_bytes) override {
    size_t bytes = a_bytes + b_bytes;
    if (room() < bytes && look_for_room() < bytes) return false;
    copy_in(head_, a, a_bytes);
    if (b_bytes) copy_in(head_ + a_bytes, b, b_bytes);
    publish(bytes);
    return true;
  }

  size_t write(const void* data, size_t bytes) override {
    bytes = std::min(bytes, look_for_room());
    if (!bytes) return 0;
    copy_in(head_, data, bytes);
    publish(bytes);
    return bytes;
  }

  bool flush() override { return true; }

  size_t readable() override {
    uint64_t bytes = in_.state->head.load(std::memory_order_acquire) - tail_;
    if (bytes <= size_) return size_t(bytes);
    corrupted("a ring holds more than fits into it");
    return 0;
  }

  bool reserve(size_t bytes) override { return bytes <= size_; }

  Span peek() override {
    size_t bytes = readable(), offset = tail_ & (size_ - 1);
    return {in_.data + offset, std::min(bytes, size_ - offset)};
  }

  void copy_out(size_t skip, void* to, size_t bytes) override {
    size_t offset = (tail_ + skip) & (size_ - 1), first = std::min(bytes, size_ - offset);
    memcpy(to, in_.data + offset, first);
    if (bytes > first) memcpy(static_cast<char*>(to) + first, in_.data, bytes - first);
  }

  void consume(size_t bytes) override {
    tail_ += bytes;
    in_.state->tail.store(tail_, std::memory_order_release);
    has_moved();
  }

  size_t read(void* to, size_t bytes) override {
    bytes = std::min(bytes, readable());
    if (!bytes) return 0;
    copy_out(0, to, bytes);
    consume(bytes);
    return bytes;
  }

  bool idle() override { return look_for_room() == size_ && readable() == 0; }

 private:
  size_t room() const { return size_ - size_t(head_ - seen_tail_); }

  size_t look_for_room() {
    uint64_t tail = out_.state->tail.load(std::memory_order_acquire);
    if (head_ - tail > size_) {
      corrupted("more was taken from a ring than was put into it");
      seen_tail_ = head_ - size_;  // no room
    } else {
      seen_tail_ = tail;
    }
    return room();
  }

  void copy_in(uint64_t at, const void* from, size_t bytes) {
    size_t offset = at & (size_ - 1), first = std::min(bytes, size_ - offset);
    memcpy(out_.data + offset, from, first);
    if (bytes > first) memcpy(out_.data, static_cast<const char*>(from) + first, bytes - first);
  }

  void publish(size_t bytes) {
    head_ += bytes;
    out_.state->head.store(head_, std::memory_order_release);
    has_moved();
  }

  const Ring out_, in_;
  const size_t size_;                             // a power of two
  uint64_t head_ = 0, tail_ = 0, seen_tail_ = 0;  // head_ - seen_tail_ <= size_, always
};

}  // namespace

std::unique_ptr<Pipe> ring_pipe(Ring out, Ring in, size_t ring_bytes) {
  return std::make_unique<RingPipe>(out, in, ring_bytes);
}

}  // namespace pncpu
