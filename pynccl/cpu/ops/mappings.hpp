// Memory of peers that lies in windows and is mapped in this process, as operations see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pncpu {

// The windows that this rank had open at one moment. They stay mapped as long as this object lives.
class Mappings {
 public:
  virtual ~Mappings() = default;
  // Equal for ranks that have the same windows open; 0 if there are none. Two ranks with the same id give the
  // same answers about each other's memory: at() of one is lends() of the other.
  virtual uint64_t id() const = 0;
  // The peer's memory here. nullptr: no single window has all of it, or this process does not map it.
  virtual char* at(int peer, uint64_t address, size_t bytes) const = 0;
  // Whether the peer maps this memory of this rank.
  virtual bool lends(int peer, uint64_t address, size_t bytes) const = 0;
};

// A peer's buffers of a collective in this process; nullptr where they are not mapped.
struct Near {
  char *send = nullptr, *recv = nullptr;
};

}  // namespace pncpu
