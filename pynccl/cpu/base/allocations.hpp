// Memory that ncclMemAlloc returned. It lies in an unnamed file, so that other processes of the host can map
// it.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "base/nccl.hpp"
#include "base/net.hpp"

namespace pncpu {

// Where an address lies in a file; `file` is -1 for memory that cannot be mapped elsewhere.
struct FilePlace {
  int file = -1;
  size_t offset = 0;
};

class Allocations {
 public:
  ncclResult_t allocate(size_t size, void** at);
  ncclResult_t free(void* at);
  // Whether the memory begins in an allocation, and whether it ends there.
  enum class Holds { Nothing, Part, All };
  Holds hold(const void* at, size_t size) const;
  FilePlace place_of(const void* at) const;
  // Keeps the memory mapped, if it is of ncclMemAlloc, after ncclMemFree, too: a window needs it.
  std::shared_ptr<const void> keep(const void* at) const;

 private:
  struct Allocation {
    ~Allocation();
    void* memory = nullptr;
    size_t bytes = 0;
    Fd file;
  };
  using Map = std::map<const char*, std::shared_ptr<const Allocation>>;
  Map::const_iterator containing(const void* at) const;
  mutable std::mutex mutex_;
  Map all_;
};

}  // namespace pncpu
