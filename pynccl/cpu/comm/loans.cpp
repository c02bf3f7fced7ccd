#include "comm/loans.hpp"

#include <algorithm>

#include "base/allocations.hpp"
#include "base/core.hpp"

namespace pncpu {

class Loans::Snapshot final : public Mappings {
 public:
  explicit Snapshot(const Loans& loans) {
    for (const auto& [number, lent] : loans.lent_)
      if (!lent.takers.empty()) lent_.push_back(lent);
    for (const auto& [place, borrowed] : loans.borrowed_) borrowed_.push_back(borrowed);
  }
  bool empty() const { return lent_.empty() && borrowed_.empty(); }
  uint64_t id() const override { return 0; }
  char* at(int peer, uint64_t address, size_t bytes) const override {
    for (const Borrowed& area : borrowed_)
      if (area.owner == peer && area.holds(address, bytes))
        return area.mapped.get() + (address - area.address);
    return nullptr;
  }
  bool lends(int peer, uint64_t address, size_t bytes) const override {
    return std::any_of(lent_.begin(), lent_.end(), [&](const Lent& area) {
      return area.holds(address, bytes) &&
             std::find(area.takers.begin(), area.takers.end(), peer) != area.takers.end();
    });
  }

 private:
  std::vector<Lent> lent_;
  std::vector<Borrowed> borrowed_;
};

std::optional<Offer> Loans::offer(const void* handle, const void* at, size_t size) {
  FilePart part = file_part_of(at, size);
  if (part.file < 0 || size == 0) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  Offer made{++offers_, reinterpret_cast<uintptr_t>(at), part};
  Lent& lent = lent_[made.number];
  lent.address = made.address, lent.size = size;
  lent.memory = per_process<Allocations>().keep(at);
  numbers_[handle] = made.number;
  return made;
}

void Loans::taken(int peer, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = lent_.find(number);
  if (it == lent_.end()) return;
  it->second.takers.push_back(peer);
  snapshot_ = nullptr;
}

std::optional<Loans::End> Loans::withdraw(const void* handle) {
  std::shared_ptr<const Snapshot> before;  // freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = numbers_.find(handle);
  if (it == numbers_.end()) return {};
  End end{it->second, started_};
  numbers_.erase(it);
  lent_.erase(end.number);
  before = std::move(snapshot_);
  return end;
}

bool Loans::borrow(int owner, int64_t pid, const Offer& offer) {
  std::shared_ptr<char> mapped = map_part(pid, offer.part);
  if (!mapped) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  Borrowed& area = borrowed_[{owner, offer.number}];
  area.address = offer.address, area.size = offer.part.size;
  area.owner = owner;
  area.mapped = std::move(mapped);
  snapshot_ = nullptr;
  return true;
}

void Loans::give_back(int owner, const End& end) {
  std::shared_ptr<char> last;
  std::shared_ptr<const Snapshot> before;
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = borrowed_.find({owner, end.number});
  if (it == borrowed_.end()) return;
  it->second.until = end.call;
  if (finished_ < end.call) return;
  last = std::move(it->second.mapped);
  borrowed_.erase(it);
  before = std::move(snapshot_);
}

void Loans::finished(uint64_t call) {
  std::shared_ptr<const Snapshot> before;
  std::lock_guard<std::mutex> lock(mutex_);
  finished_ = call;
  for (auto it = borrowed_.begin(); it != borrowed_.end();) {
    bool ended = it->second.until && *it->second.until <= call;
    if (ended) before = std::move(snapshot_);
    it = ended ? borrowed_.erase(it) : std::next(it);
  }
}

std::shared_ptr<const Mappings> Loans::now(uint64_t call) {
  std::lock_guard<std::mutex> lock(mutex_);
  started_ = call;
  if (!snapshot_) snapshot_ = std::make_shared<Snapshot>(*this);
  return snapshot_->empty() ? nullptr : snapshot_;
}

}  // namespace pncpu
