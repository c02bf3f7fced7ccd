#include "transport/transport.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>

#include "base/fork.hpp"

namespace pncpu {

constexpr size_t kLeastRing = 512;  // room for a header and a little
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kTcpBuffer = size_t(512) << 10;

Segment::Segment(int ranks, size_t ring_bytes) : ranks_(ranks) {
  // Many ranks on a host: smaller rings, so that the segment stays within reason.
  size_t pairs = size_t(ranks) * size_t(ranks);
  while (ring_bytes > kLeastRing && pairs * kChannels * ring_bytes > (size_t(256) << 20)) ring_bytes /= 2;
  ring_bytes_ = ring_bytes;
  states_at_ = align_up(sizeof(Cell) * size_t(ranks), 4096);
  acks_at_ = states_at_ + align_up(sizeof(RingState) * pairs * kChannels, 4096);
  data_at_ = acks_at_ + align_up(kCacheLine * pairs, 4096);
  bytes_ = data_at_ + pairs * kChannels * ring_bytes_;
}

ncclResult_t Segment::create() {
  fd_.reset(memfd_create("pynccl", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_) return fail(ncclSystemError, "memfd_create: %s", describe_error(errno).c_str());
  if (ftruncate(fd_.get(), off_t(bytes_)) != 0 || fcntl(fd_.get(), F_ADD_SEALS, kSeals) != 0)
    return fail(ncclSystemError, "cannot size the shared segment to %zu bytes: %s", bytes_, strerror(errno));
  return map();
}

ncclResult_t Segment::open(Fd fd) {
  fd_ = std::move(fd);
  return map();
}

ncclResult_t Segment::map() {
  struct stat st;
  // Nobody can take mapped pages away from under this process.
  bool sealed = (fcntl(fd_.get(), F_GET_SEALS) & kSeals) == kSeals;
  if (!sealed || fstat(fd_.get(), &st) != 0 || size_t(st.st_size) != bytes_)
    return fail(ncclSystemError, "the shared segment is not what was announced");
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (at == MAP_FAILED)
    return fail(ncclSystemError, "cannot map %zu bytes of shared memory: %s", bytes_, strerror(errno));
  madvise(at, bytes_, MADV_DONTFORK);
  base_ = static_cast<char*>(at);
  close_in_child(fd_.get());
  return ncclSuccess;
}

Segment::~Segment() {
  if (!base_) return;
  munmap(base_, bytes_);
  if (!forget_descriptor(fd_.get())) fd_.release();  // a forked child has closed it already
}

RingState& Segment::ring(int a, int b, int channel) const {
  return reinterpret_cast<RingState*>(base_ + states_at_)[pair(a, b) * kChannels + size_t(channel)];
}
char* Segment::ring_data(int a, int b, int channel) const {
  return base_ + data_at_ + (pair(a, b) * kChannels + size_t(channel)) * ring_bytes_;
}
void Segment::release_rings() {
  fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(data_at_), off_t(bytes_ - data_at_));
}

void Pipe::use_ring(RingState* out, char* out_data, RingState* in, char* in_data, size_t ring_bytes) {
  out_ = out;
  out_data_ = out_data;
  in_ = in;
  in_data_ = in_data;
  ring_bytes_ = ring_bytes;
}

void Pipe::use_tcp(SocketPtr socket) {
  socket_ = std::move(socket);
  received_.reset(new char[kTcpBuffer]);
}

namespace {
// Copies into or out of a ring at a running index.
void ring_copy_in(char* ring, size_t size, uint64_t at, const void* from, size_t bytes) {
  size_t offset = at & (size - 1), first = std::min(bytes, size - offset);
  memcpy(ring + offset, from, first);
  if (bytes > first) memcpy(ring, static_cast<const char*>(from) + first, bytes - first);
}
void ring_copy_out(const char* ring, size_t size, uint64_t at, void* to, size_t bytes) {
  size_t offset = at & (size - 1), first = std::min(bytes, size - offset);
  memcpy(to, ring + offset, first);
  if (bytes > first) memcpy(static_cast<char*>(to) + first, ring, bytes - first);
}
}  // namespace

bool Pipe::put(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  size_t bytes = a_bytes + b_bytes;
  if (out_) {
    if (ring_bytes_ - (head_ - seen_tail_) < bytes) {
      seen_tail_ = out_->tail.load(std::memory_order_acquire);
      if (ring_bytes_ - (head_ - seen_tail_) < bytes) return false;
    }
    ring_copy_in(out_data_, ring_bytes_, head_, a, a_bytes);
    if (b_bytes) ring_copy_in(out_data_, ring_bytes_, head_ + a_bytes, b, b_bytes);
    head_ += bytes;
    out_->head.store(head_, std::memory_order_release);
    return wrote = true;
  }
  if (!flush()) return false;
  const char* at = static_cast<const char*>(a);
  unsent_.insert(unsent_.end(), at, at + a_bytes);
  at = static_cast<const char*>(b);
  if (b_bytes) unsent_.insert(unsent_.end(), at, at + b_bytes);
  flush();
  return true;
}

size_t Pipe::write(const void* data, size_t bytes) {
  if (out_) {
    seen_tail_ = out_->tail.load(std::memory_order_acquire);
    bytes = std::min(bytes, ring_bytes_ - size_t(head_ - seen_tail_));
    if (!bytes) return 0;
    ring_copy_in(out_data_, ring_bytes_, head_, data, bytes);
    head_ += bytes;
    out_->head.store(head_, std::memory_order_release);
    wrote = true;
    return bytes;
  }
  if (!flush() || cannot_send_) return 0;
  for (;;) {
    ssize_t n = send(socket_->fd(), data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return size_t(n);
    if (errno == EINTR) continue;
    cannot_send_ = errno != EAGAIN && errno != EWOULDBLOCK;
    return 0;
  }
}

bool Pipe::flush() {
  while (sent_ < unsent_.size() && !cannot_send_) {
    ssize_t n =
        send(socket_->fd(), unsent_.data() + sent_, unsent_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n < 0)
      cannot_send_ = true;
    else
      sent_ += size_t(n);
  }
  if (sent_ < unsent_.size()) return false;
  unsent_.clear();
  sent_ = 0;
  return true;
}

void Pipe::fill() {
  if (taken_ == filled_) {
    taken_ = filled_ = 0;
  } else if (taken_ >= kTcpBuffer / 2) {
    memmove(received_.get(), received_.get() + taken_, filled_ - taken_);
    filled_ -= taken_;
    taken_ = 0;
  }
  while (filled_ < kTcpBuffer && !ended_) {
    ssize_t n = recv(socket_->fd(), received_.get() + filled_, kTcpBuffer - filled_, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0)
      ended_ = true;
    else
      filled_ += size_t(n);
  }
}

size_t Pipe::readable() {
  if (in_) return size_t(in_->head.load(std::memory_order_acquire) - tail_);
  if (!ended_) fill();
  return filled_ - taken_;
}

Span Pipe::peek() {
  size_t bytes = readable();
  if (!in_) return {received_.get() + taken_, bytes};
  size_t offset = tail_ & (ring_bytes_ - 1);
  return {in_data_ + offset, std::min(bytes, ring_bytes_ - offset)};
}

void Pipe::copy_out(size_t skip, void* to, size_t bytes) {
  if (in_)
    ring_copy_out(in_data_, ring_bytes_, tail_ + skip, to, bytes);
  else
    memcpy(to, received_.get() + taken_ + skip, bytes);
}

void Pipe::consume(size_t bytes) {
  consumed = true;
  if (in_) {
    tail_ += bytes;
    in_->tail.store(tail_, std::memory_order_release);
  } else {
    taken_ += bytes;
  }
}

bool Pipe::idle() {
  if (out_) return out_->tail.load(std::memory_order_acquire) == head_ && readable() == 0;
  return unsent_.empty() && readable() == 0;
}

RemoteResult read_remote(Remote& peer, void* to, uint64_t from, size_t bytes, bool identify) {
  uint64_t nonce[2] = {0, 0};
  size_t proof = identify ? sizeof nonce : 0, done = 0;
  while (done < bytes || proof) {
    // The nonce comes first: nothing of a stranger's memory is taken for the peer's.
    iovec local[2] = {{nonce, proof}, {static_cast<char*>(to) + done, bytes - done}};
    iovec remote[2] = {{reinterpret_cast<void*>(peer.nonce_addr), proof},
                       {reinterpret_cast<void*>(from + done), bytes - done}};
    int first = proof ? 0 : 1;
    ssize_t n = process_vm_readv(pid_t(peer.pid), local + first, size_t(2 - first), remote + first,
                                 size_t(2 - first), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return errno == ESRCH   ? RemoteResult::Gone
             : errno == EPERM ? RemoteResult::Denied
                              : RemoteResult::Fault;
    if (proof && (size_t(n) < proof || nonce[0] != peer.nonce[0] || nonce[1] != peer.nonce[1]))
      return RemoteResult::Gone;
    if (size_t(n) == proof && done < bytes) return RemoteResult::Fault;
    done += size_t(n) - proof;
    if (proof) peer.seen = Clock::now();
    proof = 0;
  }
  return RemoteResult::Ok;
}

RemoteResult write_remote(Remote& peer, const void* from, uint64_t to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    if (Clock::now() - peer.seen > std::chrono::milliseconds(1))
      if (RemoteResult r = read_remote(peer, nullptr, 0, 0, true); r != RemoteResult::Ok) return r;
    iovec local{const_cast<char*>(static_cast<const char*>(from)) + done, bytes - done};
    iovec remote{reinterpret_cast<void*>(to + done), bytes - done};
    ssize_t n = process_vm_writev(pid_t(peer.pid), &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return errno == ESRCH   ? RemoteResult::Gone
             : errno == EPERM ? RemoteResult::Denied
                              : RemoteResult::Fault;
    done += size_t(n);
  }
  return RemoteResult::Ok;
}

}  // namespace pncpu
