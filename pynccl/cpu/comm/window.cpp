#include "comm/window.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/allocations.hpp"

namespace pncpu {
namespace {

// One rank's part of a window, as its peers get it.
struct Description {
  uint64_t address = 0, size = 0, number = 0;
  int32_t flags = 0, file = -1;  // a descriptor of that rank's process
  uint64_t device = 0, inode = 0, offset = 0;
};

bool identify(int file, Description* d) {
  struct stat st;
  if (fstat(file, &st) != 0) return false;
  d->device = st.st_dev, d->inode = st.st_ino;
  return true;
}

// The peer's file is reached through /proc, which needs no more than the rights of the same user. Its
// identity is compared, since a pid or descriptor may have been reused.
char* map(int64_t pid, const Description& d) {
  std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(d.file);
  Fd file = Fd::made_by([&] { return open(path.c_str(), O_RDWR | O_CLOEXEC); });
  Description found;
  if (!file || !identify(file.get(), &found) || found.device != d.device || found.inode != d.inode)
    return nullptr;
  int seals = fcntl(file.get(), F_GET_SEALS);
  struct stat st;
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(file.get(), &st) != 0 ||
      d.offset + d.size > uint64_t(st.st_size))
    return nullptr;
  void* at = mmap(nullptr, d.size, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), off_t(d.offset));
  if (at == MAP_FAILED) return nullptr;
  madvise(at, d.size, MADV_DONTFORK);
  return static_cast<char*>(at);
}

std::string symmetric_of(const Description& d) {
  return std::string(d.flags & NCCL_WIN_COLL_SYMMETRIC ? "a symmetric" : "a") + " window of " +
         std::to_string(d.size) + " bytes";
}

}  // namespace

Window::Window(uint64_t comm_serial, uint64_t number_, void* buffer_, size_t size_, int flags_)
    : comm(comm_serial), number(number_), buffer(static_cast<char*>(buffer_)), size(size_), flags(flags_) {}

Window::~Window() {
  for (View& view : views_)
    if (view.foreign) munmap(view.mapped, view.size);
}

std::string Window::describe() const {
  Description mine;
  mine.address = reinterpret_cast<uintptr_t>(buffer);
  mine.size = size;
  mine.number = number;
  mine.flags = flags;
  FilePlace place = per_process<Allocations>().place_of(buffer);
  if (place.file >= 0 && identify(place.file, &mine)) mine.file = place.file, mine.offset = place.offset;
  return {reinterpret_cast<const char*>(&mine), sizeof mine};
}

ncclResult_t Window::attach(Session& session, const std::vector<std::string>& all) {
  std::vector<Description> ranks(all.size());
  for (size_t q = 0; q < all.size(); ++q) {
    if (all[q].size() != sizeof(Description))
      return fail(ncclInternalError, "rank %zu described its window in %zu bytes, expected %zu", q,
                  all[q].size(), sizeof(Description));
    memcpy(static_cast<void*>(&ranks[q]), all[q].data(), sizeof(Description));
  }
  for (size_t q = 1; q < ranks.size(); ++q) {
    const Description &one = ranks[0], &other = ranks[q];
    bool same = (one.flags & NCCL_WIN_COLL_SYMMETRIC) == (other.flags & NCCL_WIN_COLL_SYMMETRIC);
    if (same && (!(one.flags & NCCL_WIN_COLL_SYMMETRIC) || one.size == other.size)) continue;
    return fail(kMismatch, "%srank 0 registers %s, rank %zu %s", kMismatchText, symmetric_of(one).c_str(), q,
                symmetric_of(other).c_str());
  }
  views_.resize(ranks.size());
  lsa_size_ = session.lsa_size();
  first_lsa_ = session.rank / lsa_size_ * lsa_size_;
  for (int q = 0; q < int(ranks.size()); ++q) {
    View& view = views_[size_t(q)];
    const Description& theirs = ranks[size_t(q)];
    view.address = theirs.address;
    view.size = size_t(theirs.size);
    if (q == session.rank || session.peer(q).same_process) {
      view.mapped = reinterpret_cast<char*>(view.address);
      view.memory = per_process<Allocations>().keep(view.mapped);
    } else if (session.peer(q).local >= 0 && session.peer(q).vouched && theirs.file >= 0) {
      view.mapped = map(session.peer(q).info.pid, theirs);
      view.foreign = view.mapped != nullptr;
    }
  }
  return ncclSuccess;
}

}  // namespace pncpu
