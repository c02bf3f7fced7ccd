// A window: memory of every rank of a communicator that the others put into.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/handles.hpp"
#include "session/session.hpp"

namespace pncpu {

class Window {
 public:
  // `number` counts the windows of a communicator, and is equal on all ranks.
  Window(uint64_t comm_serial, uint64_t number, void* buffer, size_t size, int flags);
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  const uint64_t comm, number;
  char* const buffer;
  const size_t size;
  const int flags;

  // What peers need to know of it.
  std::string describe() const;
  // Takes the descriptions of all ranks and maps the memory of peers on this host, where that is possible.
  // ncclInvalidUsage, the same on all ranks, if a symmetric window differs between ranks.
  ncclResult_t attach(Session& session, const std::vector<std::string>& all);
  // Which ranks' memory this process maps, and what the others said of theirs.
  std::string reach() const;
  void learn_reach(const std::vector<std::string>& all);

  size_t size_of(int rank) const { return views_[size_t(rank)].size; }
  uint64_t address_of(int rank) const { return views_[size_t(rank)].address; }  // in the rank's own process
  char* mapped(int rank) const { return views_[size_t(rank)].mapped; }          // here; nullptr: it is not
  int shortage(int rank) const { return views_[size_t(rank)].shortage; }        // why it is not mapped, or 0
  bool mapped_by(int rank) const { return views_[size_t(rank)].mapped_there; }  // this rank's memory
  // Whether all of these bytes of the rank's memory are in the window.
  bool holds(int rank, uint64_t address, size_t bytes) const;
  int rank() const { return rank_; }
  int ranks() const { return int(views_.size()); }
  int lsa_size() const { return lsa_size_; }
  int first_lsa() const { return first_lsa_; }  // the first rank of this rank's LSA team

 private:
  struct View {
    uint64_t address = 0;
    size_t size = 0;
    char* mapped = nullptr;
    int shortage = 0;                    // errno: this process had no descriptor or memory to map it
    bool mapped_there = false;           // that rank's process maps this rank's memory
    std::shared_ptr<const void> memory;  // keeps it mapped, in this process's ranks too
  };
  std::vector<View> views_;
  int rank_ = 0, first_lsa_ = 0, lsa_size_ = 1;
};

template <>
struct HandleTraits<Window> {
  static constexpr HandleKind kind = HandleKind::Window;
  static constexpr char name[] = "win", maker[] = "ncclCommWindowRegister";
};

// Keeps a window's mappings beyond its end, for arrays over them.
struct Hold {
  std::shared_ptr<Window> window;
};

template <>
struct HandleTraits<Hold> {
  static constexpr HandleKind kind = HandleKind::Hold;
  static constexpr char name[] = "hold", maker[] = "pyncclCpuWindowHold";
};

}  // namespace pncpu
