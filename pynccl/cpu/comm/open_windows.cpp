#include "comm/open_windows.hpp"

#include <algorithm>

namespace pncpu {
namespace {

// The last step of SplitMix64: a bijection that spreads the bits of a number.
uint64_t spread(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

OpenWindows::OpenWindows(std::vector<std::shared_ptr<const Window>> windows) : windows_(std::move(windows)) {
  for (const auto& window : windows_) id_ += spread(window->number);
}

char* OpenWindows::at(int peer, uint64_t address, size_t bytes) const {
  for (const auto& window : windows_)
    if (window->mapped(peer) && window->holds(peer, address, bytes))
      return window->mapped(peer) + (address - window->address_of(peer));
  return nullptr;
}

bool OpenWindows::lends(int peer, uint64_t address, size_t bytes) const {
  return std::any_of(windows_.begin(), windows_.end(), [&](const auto& window) {
    return window->mapped_by(peer) && window->holds(window->rank(), address, bytes);
  });
}

std::shared_ptr<const OpenWindows> OpenWindows::with(std::shared_ptr<const Window> window) const {
  auto windows = windows_;
  windows.push_back(std::move(window));
  return std::make_shared<OpenWindows>(std::move(windows));
}

std::shared_ptr<const OpenWindows> OpenWindows::without(const Window& window) const {
  auto windows = windows_;
  auto is_it = [&](const auto& one) { return one.get() == &window; };
  windows.erase(std::remove_if(windows.begin(), windows.end(), is_it), windows.end());
  return windows.empty() ? nullptr : std::make_shared<OpenWindows>(std::move(windows));
}

}  // namespace pncpu
