#include "comm/file_part.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

#include "base/allocations.hpp"
#include "base/core.hpp"

namespace pncpu {
namespace {

constexpr uint64_t kPage = 4096;

bool identify(int file, FilePart* part) {
  struct stat st;
  if (fstat(file, &st) != 0) return false;
  part->device = st.st_dev, part->inode = st.st_ino;
  return true;
}

// A peer that maps a file which shrinks would be killed.
bool has_all(int file, const FilePart& part) {
  struct stat st;
  int seals = fcntl(file, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(file, &st) == 0 &&
         part.offset <= uint64_t(st.st_size) && part.size <= uint64_t(st.st_size) - part.offset;
}

}  // namespace

FilePart file_part_of(const void* at, size_t size) {
  FilePart part;
  FilePlace place = per_process<Allocations>().place_of(at);
  if (place.file >= 0 && identify(place.file, &part))
    part.file = place.file, part.offset = place.offset, part.size = size;
  return part;
}

// The peer's file is reached through /proc, which needs no more than the rights of the same user. Its
// identity is compared, since a pid or descriptor may have been reused.
std::shared_ptr<char> map_part(int64_t pid, const FilePart& part) {
  std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(part.file);
  Fd file = Fd::made_by([&] { return open(path.c_str(), O_RDWR | O_CLOEXEC); });
  if (!file) return nullptr;
  FilePart found;
  if (!identify(file.get(), &found) || found.device != part.device || found.inode != part.inode ||
      !has_all(file.get(), part))
    return errno = ESTALE, nullptr;
  const uint64_t before = part.offset % kPage, bytes = before + part.size;
  void* at =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), off_t(part.offset - before));
  if (at == MAP_FAILED) return nullptr;
  return {static_cast<char*>(at) + before, [at, bytes](char*) { munmap(at, bytes); }};
}

}  // namespace pncpu
