// Devices as streams see them: what CUDA's stream handles 0, 1 and 2 mean, and in which order the legacy
// default stream and the blocking streams of a device run.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "streams/stream.hpp"

namespace pncpu {

// One device of the ranks that share it: with PYNCCL_CPU_DEVICES a real one of the process, else the own
// device of each thread's ranks (`copy` tells apart the ranks that one thread creates on the same index).
class Domain : public std::enable_shared_from_this<Domain> {
 public:
  static std::shared_ptr<Domain> of(int device, int copy);
  Domain();
  const std::shared_ptr<Stream>& legacy() const { return legacy_; }  // handles 0 and 1
  std::shared_ptr<Stream> per_thread();                              // handle 2: the calling thread's own
  std::shared_ptr<Stream> create(bool blocking, bool attended = false);
  // The streams whose work of now completes before new work of this one.
  std::vector<std::shared_ptr<Stream>> come_before(const Stream& stream);

 private:
  void forget_idle_threads();
  std::mutex mutex_;
  const std::shared_ptr<Stream> legacy_;
  std::map<std::thread::id, std::shared_ptr<Stream>> per_thread_;
  std::vector<std::weak_ptr<Stream>> created_;  // those that are blocking
  size_t prune_at_ = 16;
};

}  // namespace pncpu
