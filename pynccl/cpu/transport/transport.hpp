// The transport of bytes between this rank and a peer. Operations use only these interfaces. ring.cpp,
// tcp.cpp and direct.cpp implement them; segment.cpp has the shared memory of a host's ranks.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/core.hpp"

namespace pncpu {

class Socket;

enum Channel { kColl = 0, kP2p = 1, kChannels = 2 };

struct Span {
  const char* data;
  size_t size;
};

// Whether any of a rank's pipes has moved bytes, or has a fault: the rank need not ask each of them.
struct PipeNews {
  bool moved = false, fault = false;
};

// A byte stream in each direction. Never blocks: it moves as many bytes as possible now.
class Pipe {
 public:
  virtual ~Pipe() = default;
  // Writes both parts completely or nothing. TCP keeps unsent bytes for flush().
  virtual bool put(const void* a, size_t a_bytes, const void* b, size_t b_bytes) = 0;
  virtual size_t write(const void* data, size_t bytes) = 0;  // returns how many were written
  virtual bool flush() = 0;                                  // true: nothing is left to send
  // The number of bytes that can be read now; never more than the capacity, whatever the peer claims.
  virtual size_t readable() = 0;
  virtual bool reserve(size_t bytes) = 0;  // ensures that capacity; false: impossible
  virtual Span peek() = 0;                 // the contiguous beginning of what is readable
  virtual void copy_out(size_t skip, void* to, size_t bytes) = 0;  // of what is readable; does not consume
  virtual void consume(size_t bytes) = 0;                          // of what is readable
  virtual size_t read(void* to, size_t bytes) = 0;                 // returns how many were read
  // Whether bytes of a peer that has ended may still arrive.
  virtual bool more_may_come() { return false; }
  virtual bool idle() = 0;  // nothing underway in either direction
  virtual std::shared_ptr<Socket> socket() const { return nullptr; }
  virtual void close() {}

  void tell(PipeNews* news) { news_ = news; }
  // How the peer has corrupted the pipe, which then moves no more bytes; nullptr: it has not.
  const char* fault() const { return fault_; }
  // Whether bytes have moved in shared memory since the last call, so that the peer's bell must ring. A
  // socket wakes the peer by itself.
  bool take_moved() { return moved_ && !(moved_ = false); }

 protected:
  void has_moved() { moved_ = news_->moved = true; }
  void corrupted(const char* how) { fault_ = how, news_->fault = true; }

 private:
  PipeNews own_;
  PipeNews* news_ = &own_;
  bool moved_ = false;
  const char* fault_ = nullptr;
};

enum class RemoteResult {
  Ok,
  Gone,    // the process has ended
  Fault,   // no such memory
  Denied,  // by the kernel
  Closed   // the peer has failed and forbids access to its buffers
};

// Direct access to the memory of a peer on this host.
class Memory {
 public:
  virtual ~Memory() = default;
  // The peer's address in this process; nullptr: only copies are possible.
  virtual const char* at(uint64_t) const { return nullptr; }
  // `identify`: first check that the process is still the same. This pins another page, so do not check every
  // block.
  virtual RemoteResult read(void* to, uint64_t from, size_t bytes, bool identify) = 0;
  virtual RemoteResult write(const void* from, uint64_t to, size_t bytes) = 0;
  virtual bool works() = 0;  // whether the kernel permits access; tries to read and write the nonce
};

// One rank's part of a host's shared segment.
struct alignas(kCacheLine) Cell {
  Doorbell bell;
  // How many peers must still tell a stage before the bell need ring for it.
  std::atomic<int32_t> awaited;
  alignas(kCacheLine) std::atomic<uint32_t> closed;  // peers must not use its buffers
};

// What a rank shows all others of its host at the start of a collective.
struct alignas(kCacheLine) Notice {
  std::atomic<uint64_t> number;  // of the collective; stored last
  char head[kCacheLine];
  char few[56];  // data that follows the head, if it fits here
};

// A rank's notices and the room for more data, for odd and even numbers. Only that rank writes them.
class Board {
 public:
  Board() = default;
  // The second notice lies `apart` ranks behind the first, its data as many times `most` bytes.
  Board(Notice* notices, char* data, size_t apart, size_t most)
      : notices_(notices), data_(data), apart_(apart), most_(most) {}
  explicit operator bool() const { return notices_ != nullptr; }
  Notice& notice(uint64_t number) const { return notices_[(number & 1) * apart_]; }
  char* data(uint64_t number, size_t bytes) const {
    return bytes <= sizeof(Notice::few) ? notice(number).few : data_ + (number & 1) * apart_ * most_;
  }
  size_t most() const { return most_; }  // bytes of data

 private:
  Notice* notices_ = nullptr;
  char* data_ = nullptr;
  size_t apart_ = 0, most_ = 0;
};

// The state that one rank of a host shows another one. Only that rank writes it.
struct alignas(kCacheLine) Signals {
  std::atomic<uint64_t> stage;   // its progress: collective << 8 | stage of its schedule
  std::atomic<uint64_t> taken;   // number of the other's large messages that it has read directly
  std::atomic<uint64_t> inside;  // 1 while it uses the other's buffers
};

// The signals of one-sided calls that one rank of a host has for another: contexts x signals of a context.
constexpr int kCounters = 64;

// The connection of this rank to one peer.
struct Link {
  std::string name;  // of the peer, for messages: "pid 7 on node3"
  std::unique_ptr<Pipe> pipe[kChannels];
  std::unique_ptr<Memory> memory;  // only if both can access each other's memory
  Cell* cell = nullptr;            // the peer's; nullptr if it is on another host
  Board board;                     // the peer's; none if it is on another host
  Signals *mine = nullptr, *theirs = nullptr;
  // Signals of one-sided calls to and from the peer, in shared memory; nullptr if it is on another host.
  std::atomic<uint64_t>*counters_out = nullptr, *counters_in = nullptr;

  bool direct() const { return memory != nullptr; }
  void ring() const {
    if (cell) cell->bell.ring();
  }
  // Tells the peer a stage. Wakes it if no other rank must tell it one first.
  void tell(uint64_t stage) const {
    mine->stage.store(stage, std::memory_order_release);
    if (cell->awaited.fetch_sub(1, std::memory_order_seq_cst) <= 1) cell->bell.ring();
  }
  bool take_moved();
  // Whether this rank may use the peer's buffers, until leave(). It sets `inside`, then checks Cell::closed.
  // A rank that fails sets `closed`, then waits until `inside` is 0 for all peers.
  bool enter() const;
  void leave() const { mine->inside.store(0, std::memory_order_release); }
  // Like `memory`'s functions; Closed if enter() fails.
  RemoteResult read(void* to, uint64_t from, size_t bytes, bool identify) const;
  RemoteResult write(const void* from, uint64_t to, size_t bytes) const;
  // From or to memory of the peer that is mapped here; false if enter() fails.
  bool copy(void* to, const void* from, size_t bytes) const;
};

// Gives a pipe its socket once the two ranks are connected.
class SocketSource {
 public:
  virtual ~SocketSource() = default;
  // nullptr: there is no socket yet, or, with *never set, there will be none. `wanted`: to send.
  virtual std::shared_ptr<Socket> open(bool wanted, bool* never) = 0;
  virtual bool may_open() = 0;  // even if the peer has ended
};
std::unique_ptr<Pipe> tcp_pipe(std::unique_ptr<SocketSource> source);
std::unique_ptr<Pipe> tcp_pipe(std::shared_ptr<Socket> socket);

// One direction of a ring in shared memory. Each side also keeps a private copy of its own index, since the
// other side can write anything here.
struct RingState {
  alignas(kCacheLine) std::atomic<uint64_t> head;  // bytes written
  alignas(kCacheLine) std::atomic<uint64_t> tail;  // bytes consumed
};
struct Ring {
  RingState* state;
  char* data;
};
std::unique_ptr<Pipe> ring_pipe(Ring out, Ring in, size_t ring_bytes);

// Another process, and the address and value of the nonce that proves its identity.
struct Remote {
  int64_t pid = 0;
  uint64_t nonce_addr = 0;
  uint64_t nonce[2] = {0, 0};
};
// PYNCCL_CPU_PTRACER: lets one launcher's processes read this one's memory where Yama forbids it.
void let_ranks_read();
std::unique_ptr<Memory> process_memory(const Remote& peer);
std::unique_ptr<Memory> own_memory();  // of a peer in this very process

}  // namespace pncpu
