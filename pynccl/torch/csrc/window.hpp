// Windows of torch 2.15: one-sided calls over ncclPutSignal, ncclSignal and ncclWaitSignal.
#pragma once

#include "backend.hpp"

#ifdef PYNCCL_HAS_WINDOWS

namespace pynccl {

// The memory of one tensor on each rank. As in ProcessGroupNCCL a put counts one signal at its peer, and
// signals are those of the pair of ranks, not of the window.
class Window : public c10d::Window {
 public:
  explicit Window(intrusive_ptr<Backend> backend) : backend_(std::move(backend)) {}

  void tensor_register(const at::Tensor& tensor, bool owning = true) override;
  void tensor_deregister() override;
  WorkPtr put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
              const c10d::PutOptions& options) override;
  WorkPtr signal(int64_t peer, bool async, const c10d::SignalOptions& options) override;
  WorkPtr wait_signal(int64_t peer, bool async, const c10d::WaitSignalOptions& options) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10d::WindowAttr get_attr(int64_t peer) override;

 private:
  // What a put needs to know of a peer's tensor.
  struct Peer {
    int64_t elements;
    at::ScalarType dtype;
  };

  void check_registered(const char* function) const;
  void check_alone(const char* function) const;
  int checked_peer(const char* function, int64_t peer) const;
  void check_put(const at::Tensor& tensor, int peer, int64_t offset) const;
  std::vector<Peer> exchange(const at::Tensor& tensor) const;
  Call call_on_window(std::string name) const;
  template <class Options>
  WorkPtr run(Call call, const Options& options, bool async) const;

  intrusive_ptr<Backend> backend_;
  ncclWindow_t window_ = nullptr;
  uint64_t group_ = 0;  // the number of the group that has the window
  c10::Device device_{at::kCPU};
  at::Tensor own_;  // undefined if the caller owns it
  std::vector<Peer> peers_;
};

}  // namespace pynccl

#endif
