// The open windows of a communicator at one moment. A call takes them when it starts and holds them until it
// ends, so that a window which is deregistered meanwhile stays mapped.
#pragma once

#include <memory>
#include <vector>

#include "comm/window.hpp"
#include "ops/mappings.hpp"

namespace pncpu {

class OpenWindows final : public Mappings {
 public:
  explicit OpenWindows(std::vector<std::shared_ptr<const Window>> windows);
  uint64_t id() const override { return id_; }
  char* at(int peer, uint64_t address, size_t bytes) const override;
  bool lends(int peer, uint64_t address, size_t bytes) const override;

  // The same windows and one more, or one less.
  std::shared_ptr<const OpenWindows> with(std::shared_ptr<const Window> window) const;
  std::shared_ptr<const OpenWindows> without(const Window& window) const;

 private:
  const std::vector<std::shared_ptr<const Window>> windows_;
  uint64_t id_ = 0;
};

}  // namespace pncpu
