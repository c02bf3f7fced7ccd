#include "comm/window.hpp"

#include "base/allocations.hpp"
#include "comm/file_part.hpp"

namespace pncpu {
namespace {

// One rank's part of a window, as its peers get it.
struct Description {
  uint64_t address = 0, size = 0, number = 0;
  int32_t flags = 0, pad = 0;
  FilePart part;
};

std::string symmetric_of(const Description& d) {
  return std::string(d.flags & NCCL_WIN_COLL_SYMMETRIC ? "a symmetric" : "a") + " window of " +
         std::to_string(d.size) + " bytes";
}

}  // namespace

Window::Window(uint64_t comm_serial, uint64_t number_, void* buffer_, size_t size_, int flags_)
    : comm(comm_serial), number(number_), buffer(static_cast<char*>(buffer_)), size(size_), flags(flags_) {}

std::string Window::describe() const {
  Description mine;
  mine.address = reinterpret_cast<uintptr_t>(buffer);
  mine.size = size;
  mine.number = number;
  mine.flags = flags;
  mine.part = file_part_of(buffer, size);
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
  rank_ = session.rank;
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
    } else if (session.peer(q).local >= 0 && session.peer(q).vouched && theirs.part.file >= 0 &&
               theirs.part.size == theirs.size) {
      std::shared_ptr<char> mapping = map_part(session.peer(q).info.pid, theirs.part);
      if (!mapping && (out_of_descriptors(errno) || errno == ENOMEM)) view.shortage = errno;
      view.mapped = mapping.get();
      view.memory = std::move(mapping);
    }
  }
  return ncclSuccess;
}

std::string Window::reach() const {
  std::string mapped;
  for (const View& view : views_) mapped += view.mapped ? '1' : '0';
  return mapped;
}

void Window::learn_reach(const std::vector<std::string>& all) {
  for (size_t q = 0; q < views_.size(); ++q)
    views_[q].mapped_there = all[q].size() == views_.size() && all[q][size_t(rank_)] == '1';
}

bool Window::holds(int rank, uint64_t address, size_t bytes) const {
  const View& view = views_[size_t(rank)];
  return address >= view.address && bytes <= view.size && address - view.address <= view.size - bytes;
}

}  // namespace pncpu
