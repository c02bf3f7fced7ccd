// Memory of ncclMemAlloc as another process of the host maps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pncpu {

// Where memory lies in a file of its process; the file is -1 for memory that cannot be mapped elsewhere.
struct FilePart {
  int32_t file = -1;  // a descriptor of that process
  uint32_t pad = 0;
  uint64_t device = 0, inode = 0, offset = 0, size = 0;
};
FilePart file_part_of(const void* at, size_t size);

// Maps another process's memory; nullptr with errno set if that fails.
std::shared_ptr<char> map_part(int64_t pid, const FilePart& part);

}  // namespace pncpu
