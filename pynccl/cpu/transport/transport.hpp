// How bytes get between this rank and a peer. Operations know these interfaces alone; ring.cpp, tcp.cpp and
// direct.cpp implement them, segment.cpp holds the memory that the ranks of a host share.
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

// A byte stream each way. Never blocks: it takes or gives what it can now.
class Pipe {
 public:
  virtual ~Pipe() = default;
  // All of both parts or nothing. TCP keeps what it cannot send at once for flush().
  virtual bool put(const void* a, size_t a_bytes, const void* b, size_t b_bytes) = 0;
  virtual size_t write(const void* data, size_t bytes) = 0;  // how many it took
  virtual bool flush() = 0;                                  // true when nothing is left unsent
  // How many bytes can be read now: at most what the pipe holds at once, whatever the peer claims.
  virtual size_t readable() = 0;
  virtual bool reserve(size_t bytes) = 0;  // lets readable() reach that many; false: never
  virtual Span peek() = 0;                 // the contiguous beginning of what is readable
  virtual void copy_out(size_t skip, void* to, size_t bytes) = 0;  // of what is readable; does not consume
  virtual void consume(size_t bytes) = 0;                          // of what is readable
  virtual size_t read(void* to, size_t bytes) = 0;                 // takes what there is, how many
  // Whether bytes of a peer that has ended may still be on their way.
  virtual bool more_may_come() { return false; }
  virtual bool idle() = 0;  // nothing underway in either direction
  virtual std::shared_ptr<Socket> socket() const { return nullptr; }
  virtual void close() {}

  // What is impossible about the peer's side; nothing moves any more then. nullptr while all is well.
  const char* fault() const { return fault_; }
  // Whether bytes moved in shared memory since this was last asked: the peer's bell is to be rung. A socket
  // wakes the peer itself.
  bool take_moved() { return moved_ && !(moved_ = false); }

 protected:
  bool moved_ = false;
  const char* fault_ = nullptr;
};

enum class RemoteResult {
  Ok,
  Gone,    // the process has ended
  Fault,   // no such memory
  Denied,  // by the kernel
  Closed   // the peer has failed and lets nobody use its buffers any more
};

// Direct access to the memory of a peer on this host.
class Memory {
 public:
  virtual ~Memory() = default;
  // Where this process sees the peer's address; nullptr where it can only copy.
  virtual const char* at(uint64_t) const { return nullptr; }
  // With `identify` it first checks that the process is still the one that was introduced: a page more to
  // pin, so not for every block.
  virtual RemoteResult read(void* to, uint64_t from, size_t bytes, bool identify) = 0;
  virtual RemoteResult write(const void* from, uint64_t to, size_t bytes) = 0;
  virtual bool works() = 0;  // whether the kernel lets this process read and write there, tried on the nonce
};

// One rank's part of a host's shared segment.
struct alignas(kCacheLine) Cell {
  Doorbell bell;
  std::atomic<uint32_t> closed;  // nobody may use its buffers any more
};

// What one rank of a host tells one other. Only that rank writes it.
struct alignas(kCacheLine) Signals {
  std::atomic<uint64_t> stage;   // up to where it has come: collective << 8 | stage of its schedule
  std::atomic<uint64_t> taken;   // how many of the other's large messages it has read from memory
  std::atomic<uint64_t> inside;  // 1 while it uses the other's buffers
};

// All that connects this rank with one peer.
struct Link {
  std::string name;  // whose it is, for messages: "pid 7 on node3"
  std::unique_ptr<Pipe> pipe[kChannels];
  std::unique_ptr<Memory> memory;  // only where each of the two reads and writes the other's
  Cell* cell = nullptr;            // the peer's, and the words between the two; nullptr on another host
  Signals *mine = nullptr, *theirs = nullptr;

  bool direct() const { return memory != nullptr; }
  void ring() const {
    if (cell) cell->bell.ring();
  }
  bool take_moved();
  // Whether the peer's buffers may be used, until leave(): a user says that it is inside, then looks whether
  // it may be; a rank that fails forbids it (Cell::closed), then waits for those who are inside.
  bool enter() const;
  void leave() const { mine->inside.store(0, std::memory_order_release); }
  // Those of `memory`, or Closed.
  RemoteResult read(void* to, uint64_t from, size_t bytes, bool identify) const;
  RemoteResult write(const void* from, uint64_t to, size_t bytes) const;
};

std::unique_ptr<Pipe> tcp_pipe(std::shared_ptr<Socket> socket);

// One direction of a ring in shared memory. Each side keeps its own index to itself, too: the other can write
// what it likes here.
struct RingState {
  alignas(kCacheLine) std::atomic<uint64_t> head;  // bytes written
  alignas(kCacheLine) std::atomic<uint64_t> tail;  // bytes consumed
};
struct Ring {
  RingState* state;
  char* data;
};
std::unique_ptr<Pipe> ring_pipe(Ring out, Ring in, size_t ring_bytes);

// Where another process is, and the 128 bits at an address of its memory that prove it.
struct Remote {
  int64_t pid = 0;
  uint64_t nonce_addr = 0;
  uint64_t nonce[2] = {0, 0};
};
std::unique_ptr<Memory> process_memory(const Remote& peer);
std::unique_ptr<Memory> own_memory();  // of a peer in this very process

}  // namespace pncpu
