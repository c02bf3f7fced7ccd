// How bytes get from one rank to another: rings in shared memory on one host, TCP between hosts, and direct
// reads of a peer's memory where the kernel permits them.
#pragma once

#include <memory>
#include <vector>

#include "service/service.hpp"

namespace pncpu {

enum Channel { kColl = 0, kP2p = 1, kChannels = 2 };

struct RingState {
  alignas(kCacheLine) std::atomic<uint64_t> head;  // bytes written
  alignas(kCacheLine) std::atomic<uint64_t> tail;  // bytes consumed
};

// One rank's part of a host's shared segment.
struct alignas(kCacheLine) Cell {
  Doorbell bell;
  std::atomic<uint64_t> passed_on;  // the last all_reduce whose results it has written to the others
  std::atomic<uint64_t> read_done;  // the last collective of which it has read all it needs
  std::atomic<uint32_t> closed;     // nobody may write into its buffers any more
};

// The memory that the ranks of one communicator on one host share: an unnamed file, so nothing is left
// behind. Mapped once in a process however many of its ranks use it.
class Segment {
 public:
  Segment(int ranks, size_t ring_bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ncclResult_t create();
  ncclResult_t open(Fd fd);
  int fd() const { return fd_.get(); }
  size_t bytes() const { return bytes_; }
  size_t ring_bytes() const { return ring_bytes_; }
  Cell& cell(int local) const { return reinterpret_cast<Cell*>(base_)[local]; }
  // From `a` to `b`: the ring, its bytes, how many of a's large messages b has read, whether a writes into
  // b's buffers.
  RingState& ring(int a, int b, int channel) const;
  char* ring_data(int a, int b, int channel) const;
  std::atomic<uint64_t>& acked(int a, int b) const { return pair_words(a, b)[0]; }
  std::atomic<uint64_t>& writing(int a, int b) const { return pair_words(a, b)[1]; }
  void release_rings();  // gives the rings' pages back; they come again, empty, when used

 private:
  ncclResult_t map();
  std::atomic<uint64_t>* pair_words(int a, int b) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + acks_at_ + pair(a, b) * kCacheLine);
  }
  size_t pair(int a, int b) const { return size_t(a) * size_t(ranks_) + size_t(b); }
  int ranks_;
  size_t ring_bytes_, states_at_, acks_at_, data_at_, bytes_;
  Fd fd_;
  char* base_ = nullptr;
};

struct Span {
  const char* data;
  size_t size;
};

// A byte stream each way between this rank and a peer. Never blocks; a writer sees 0 when there is no room.
class Pipe {
 public:
  void use_ring(RingState* out, char* out_data, RingState* in, char* in_data, size_t ring_bytes);
  void use_tcp(SocketPtr socket);
  // All of both parts or nothing; what TCP does not take at once is kept and sent by flush().
  bool put(const void* a, size_t a_bytes, const void* b, size_t b_bytes);
  size_t write(const void* data, size_t bytes);  // as much as there is room for
  bool flush();                                  // true when nothing is left unsent
  size_t readable();
  Span peek();                                         // the contiguous part of what is readable
  void copy_out(size_t skip, void* to, size_t bytes);  // of what is readable, without consuming
  void consume(size_t bytes);
  bool wrote = false, consumed = false;  // since the last time the owner looked: a bell to ring
  bool idle();                           // nothing underway in either direction
  const SocketPtr& socket() const { return socket_; }
  void close() { socket_.reset(); }

 private:
  void fill();
  RingState *out_ = nullptr, *in_ = nullptr;
  char *out_data_ = nullptr, *in_data_ = nullptr;
  size_t ring_bytes_ = 0;
  uint64_t head_ = 0, tail_ = 0, seen_tail_ = 0;  // private copies of the indices
  SocketPtr socket_;
  bool cannot_send_ = false, ended_ = false;  // a peer that has left may still have sent what is needed
  std::vector<char> unsent_;
  std::unique_ptr<char[]> received_;
  size_t sent_ = 0, taken_ = 0, filled_ = 0;
};

// What direct access to a peer's memory needs.
struct Remote {
  int64_t pid = 0;
  uint64_t nonce_addr = 0;
  uint64_t nonce[2] = {0, 0};
  Clock::time_point seen{};  // when its identity was last checked
};
enum class RemoteResult { Ok, Gone, Fault, Denied };
// Copies from the peer's memory. With `identify` it also checks, by the nonce, that the process is still the
// one that was introduced; a page more to pin, so not for every block.
RemoteResult read_remote(Remote& peer, void* to, uint64_t from, size_t bytes, bool identify);
// Copies into the peer's memory, whose identity has been checked within the last millisecond: no process id
// comes round in that time.
RemoteResult write_remote(Remote& peer, const void* from, uint64_t to, size_t bytes);

}  // namespace pncpu
