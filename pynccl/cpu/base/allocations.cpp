#include "base/allocations.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/core.hpp"

namespace pncpu {
namespace {

constexpr size_t kPage = 4096;

// Without a descriptor or shared memory the allocation is private: peers copy instead of mapping it. Half of
// the process's descriptors stay for everything else.
Fd file_of(size_t bytes) {
  rlimit most{};
  Fd file = Fd::made_by([] { return memfd_create("pynccl-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (!file || getrlimit(RLIMIT_NOFILE, &most) != 0 || rlim_t(file.get()) >= most.rlim_cur / 2) return {};
  // The size is sealed: a peer that maps a file which shrinks would be killed.
  bool sound = ftruncate(file.get(), off_t(bytes)) == 0 &&
               fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  return sound ? std::move(file) : Fd();
}

void* map(size_t bytes, int file) {
  int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
}

// The kernel refuses private memory that the machine cannot have; it does not ask so for files.
bool fits(size_t bytes) {
  void* at = map(bytes, -1);
  return at != MAP_FAILED && munmap(at, bytes) == 0;
}

}  // namespace

Allocations::Allocation::~Allocation() {
  if (memory) munmap(memory, bytes);
}

ncclResult_t Allocations::allocate(size_t size, void** at) {
  auto made = std::make_shared<Allocation>();
  made->bytes = align_up(size, kPage);
  if (fits(made->bytes)) made->file = file_of(made->bytes);
  void* memory = map(made->bytes, made->file.get());
  if (memory == MAP_FAILED)
    return fail_in("ncclMemAlloc", ncclSystemError, "%zu bytes: %s", size, strerror(errno));
  made->memory = memory;
  std::lock_guard<std::mutex> lock(mutex_);
  all_[static_cast<const char*>(memory)] = std::move(made);
  *at = memory;
  return ncclSuccess;
}

ncclResult_t Allocations::free(void* at) {
  std::shared_ptr<const Allocation> gone;
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = all_.find(static_cast<const char*>(at));
  if (it == all_.end())
    return fail_in("ncclMemFree", ncclInvalidArgument,
                   "%p was not returned by ncclMemAlloc in this process, or was freed before", at);
  gone = std::move(it->second);
  all_.erase(it);
  return ncclSuccess;
}

Allocations::Map::const_iterator Allocations::containing(const void* at) const {
  auto address = static_cast<const char*>(at);
  auto after = all_.upper_bound(address);
  if (after == all_.begin()) return all_.end();
  auto it = std::prev(after);
  return size_t(address - it->first) < it->second->bytes ? it : all_.end();
}

Allocations::Holds Allocations::hold(const void* at, size_t size) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = containing(at);
  if (it == all_.end()) return Holds::Nothing;
  return size <= it->second->bytes - size_t(static_cast<const char*>(at) - it->first) ? Holds::All
                                                                                      : Holds::Part;
}

FilePlace Allocations::place_of(const void* at) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = containing(at);
  if (it == all_.end() || !it->second->file) return {};
  return {it->second->file.get(), size_t(static_cast<const char*>(at) - it->first)};
}

std::shared_ptr<const void> Allocations::keep(const void* at) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = containing(at);
  return it == all_.end() ? nullptr : it->second;
}

}  // namespace pncpu
