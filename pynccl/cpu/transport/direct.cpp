// Direct access to a peer's memory: through the kernel, or by plain loads and stores in one process.
#include <sys/prctl.h>
#include <sys/uio.h>

#include "transport/transport.hpp"

namespace pncpu {
namespace {

RemoteResult result_of(int error) {
  return error == ESRCH ? RemoteResult::Gone : error == EPERM ? RemoteResult::Denied : RemoteResult::Fault;
}

class ProcessMemory final : public Memory {
 public:
  explicit ProcessMemory(const Remote& peer) : peer_(peer) {}

  RemoteResult read(void* to, uint64_t from, size_t bytes, bool identify) override {
    uint64_t nonce[2] = {0, 0};
    size_t proof = identify ? sizeof nonce : 0, done = 0;
    while (done < bytes || proof) {
      // The nonce comes first, so that another process's memory is never taken for the peer's.
      iovec local[2] = {{nonce, proof}, {static_cast<char*>(to) + done, bytes - done}};
      iovec remote[2] = {{reinterpret_cast<void*>(peer_.nonce_addr), proof},
                         {reinterpret_cast<void*>(from + done), bytes - done}};
      size_t first = proof ? 0 : 1;
      ssize_t n = process_vm_readv(pid_t(peer_.pid), local + first, 2 - first, remote + first, 2 - first, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return result_of(errno);
      if (proof && (size_t(n) < proof || nonce[0] != peer_.nonce[0] || nonce[1] != peer_.nonce[1]))
        return RemoteResult::Gone;
      if (size_t(n) == proof && done < bytes) return RemoteResult::Fault;  // n may be 0, too
      done += size_t(n) - proof;
      if (proof) seen_ = Clock::now();
      proof = 0;
    }
    return RemoteResult::Ok;
  }

  // Writes only within a millisecond after a check of the peer's identity: no pid is reused in that time.
  RemoteResult write(const void* from, uint64_t to, size_t bytes) override {
    for (size_t done = 0; done < bytes;) {
      if (Clock::now() - seen_ > std::chrono::milliseconds(1))
        if (RemoteResult r = read(nullptr, 0, 0, true); r != RemoteResult::Ok) return r;
      iovec local{const_cast<char*>(static_cast<const char*>(from)) + done, bytes - done};
      iovec remote{reinterpret_cast<void*>(to + done), bytes - done};
      ssize_t n = process_vm_writev(pid_t(peer_.pid), &local, 1, &remote, 1, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return result_of(errno);
      if (n == 0) return RemoteResult::Fault;
      done += size_t(n);
    }
    return RemoteResult::Ok;
  }

  bool works() override {
    return read(nullptr, 0, 0, true) == RemoteResult::Ok &&
           write(peer_.nonce, peer_.nonce_addr, sizeof peer_.nonce) == RemoteResult::Ok;
  }

 private:
  const Remote peer_;
  Clock::time_point seen_{};  // when its identity was last checked
};

class OwnMemory final : public Memory {
 public:
  const char* at(uint64_t address) const override { return reinterpret_cast<const char*>(address); }
  RemoteResult read(void* to, uint64_t from, size_t bytes, bool) override {
    memcpy(to, at(from), bytes);
    return RemoteResult::Ok;
  }
  RemoteResult write(const void* from, uint64_t to, size_t bytes) override {
    memcpy(reinterpret_cast<void*>(to), from, bytes);
    return RemoteResult::Ok;
  }
  bool works() override { return true; }
};

}  // namespace

void let_ranks_read() {
  long launcher = param_int("PYNCCL_CPU_PTRACER");
  if (launcher == 0) return;
  // The parent of an orphan is the ancestor of all processes.
  if (launcher < 0 && (launcher = getppid()) <= 1) return;
  if (prctl(PR_SET_PTRACER, launcher, 0, 0, 0) == 0)
    log(Level::Info, "PYNCCL_CPU_PTRACER: descendants of process %ld may read this process's memory",
        launcher);
  else
    log(Level::Info, "PYNCCL_CPU_PTRACER has no effect: the kernel has no Yama, or there is no process %ld",
        launcher);
}

std::unique_ptr<Memory> process_memory(const Remote& peer) { return std::make_unique<ProcessMemory>(peer); }
std::unique_ptr<Memory> own_memory() { return std::make_unique<OwnMemory>(); }

bool Link::take_moved() {
  bool moved = false;
  for (auto& p : pipe) moved = (p && p->take_moved()) || moved;
  return moved;
}

bool Link::enter() const {
  mine->inside.store(1, std::memory_order_seq_cst);
  if (!cell->closed.load(std::memory_order_seq_cst)) return true;
  leave();
  return false;
}

RemoteResult Link::read(void* to, uint64_t from, size_t bytes, bool identify) const {
  if (!enter()) return RemoteResult::Closed;
  RemoteResult r = memory->read(to, from, bytes, identify);
  leave();
  return r;
}

RemoteResult Link::write(const void* from, uint64_t to, size_t bytes) const {
  if (!enter()) return RemoteResult::Closed;
  RemoteResult r = memory->write(from, to, bytes);
  leave();
  return r;
}

bool Link::copy(void* to, const void* from, size_t bytes) const {
  if (!enter()) return false;
  memcpy(to, from, bytes);
  leave();
  return true;
}

}  // namespace pncpu
