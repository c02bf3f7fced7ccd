// A device as its streams see it: the meaning of CUDA's stream handles 0, 1 and 2, and the order of the
// legacy default stream and the blocking streams.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "streams/stream.hpp"

namespace pncpu {

// One device. With PYNCCL_CPU_DEVICES the ranks of the process share it. Otherwise each thread has its own
// devices, and `copy` distinguishes ranks that one thread creates with the same device number.
class Domain : public std::enable_shared_from_this<Domain> {
 public:
  static std::shared_ptr<Domain> of(int device, int copy);
  Domain();
  const std::shared_ptr<Stream>& legacy() const { return legacy_; }  // handles 0 and 1
  std::shared_ptr<Stream> per_thread();                              // handle 2: the calling thread's own
  std::shared_ptr<Stream> create(bool blocking, bool attended = false);
  // The streams whose current work must complete before new work of this one.
  std::vector<std::shared_ptr<Stream>> come_before(const Stream& stream);

 private:
  void forget_idle_threads();
  std::mutex mutex_;
  const std::shared_ptr<Stream> legacy_;
  std::map<std::thread::id, std::shared_ptr<Stream>> per_thread_;
  std::vector<std::weak_ptr<Stream>> created_;  // the blocking ones
  size_t prune_at_ = 16;
};

}  // namespace pncpu
