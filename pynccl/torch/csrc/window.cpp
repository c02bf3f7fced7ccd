// Windows of torch 2.15.
#include "window.hpp"

#ifdef PYNCCL_HAS_WINDOWS

namespace pynccl {

void Window::check_registered(const char* function) const {
  TORCH_CHECK(window_, function, ": the window has no tensor; expected tensor_register first");
  TORCH_CHECK(group_ == backend_->groups_, function,
              ": the window ended when the group was reconfigured; expected a new window");
}

// A group would only record the calls of which this needs the results.
void Window::check_alone(const char* function) const {
  auto lock = backend_->entered();
  TORCH_CHECK(!backend_->coalesced_, function, " cannot be coalesced");
}

int Window::checked_peer(const char* function, int64_t peer) const {
  check_registered(function);
  TORCH_CHECK_VALUE(peer >= 0 && peer < backend_->getSize(), function, ": rank is ", peer,
                    ", expected a rank from 0 to ", backend_->getSize() - 1);
  return int(peer);
}

Call Window::call_on_window(std::string name) const {
  Call call;
  call.name = std::move(name), call.device = device_;
  return call;
}

template <class Options>
WorkPtr Window::run(Call call, const Options& options, bool async) const {
  TORCH_CHECK_VALUE(options.hints.empty(), call.name, ": hints has ", options.hints.size(),
                    " entries, expected none");
  WorkPtr work = backend_->launch(std::move(call), options.timeout, async ? Pace::Now : Pace::Awaited);
  if (!async) work->wait();
  return work;
}

// With it the ranks meet under the group's time-out: ncclCommWindowRegister has none.
std::vector<Window::Peer> Window::exchange(const at::Tensor& tensor) const {
  auto mine = at::tensor({tensor.numel(), int64_t(tensor.scalar_type())}, at::kLong).to(tensor.device());
  at::Tensor all = at::empty({backend_->getSize(), 2}, mine.options());
  backend_->launch(backend_->all_gather_call(all, mine), kOfTheGroup, Pace::Awaited)->wait();
  all = all.cpu();
  std::vector<Peer> peers;
  for (int64_t r = 0; r < all.size(0); ++r)
    peers.push_back({all[r][0].item<int64_t>(), at::ScalarType(all[r][1].item<int64_t>())});
  return peers;
}

void Window::tensor_register(const at::Tensor& tensor, bool owning) {
  at::AutoDispatchBelowADInplaceOrView no_grad;
  TORCH_CHECK(!window_, "tensor_register: the window has a tensor; expected tensor_deregister first");
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous(),
                    "tensor_register: tensor is not a dense contiguous tensor");
  check_alone("tensor_register");
  device_ = tensor.device();
  peers_ = exchange(tensor);
  // NCCL puts only from and into symmetric windows on devices.
  const int flags = device_.is_cpu() ? NCCL_WIN_DEFAULT : NCCL_WIN_COLL_SYMMETRIC;
  auto made = std::make_shared<ncclWindow_t>();
  Call call = call_on_window("tensor_register");
  call.kept = {tensor};
  call.issue = [=, data = tensor.data_ptr(), bytes = tensor.nbytes()](const Api& api, ncclComm_t comm,
                                                                      cudaStream_t) {
    return PYNCCL_KNOWN(api, ncclCommWindowRegister)(comm, data, bytes, made.get(), flags);
  };
  backend_->launch(std::move(call), kOfTheGroup, Pace::Awaited)->wait();
  TORCH_CHECK(*made, "tensor_register: NCCL made no window: these devices have no direct access");
  window_ = *made, group_ = backend_->groups_;
  if (!owning) return;
  own_ = tensor;
  auto lane = backend_->lane(device_);
  auto lock = backend_->entered();
  lane->windows[window_] = tensor;
}

void Window::tensor_deregister() {
  check_registered("tensor_deregister");
  check_alone("tensor_deregister");
  // Until every rank has come puts may be under way.
  c10d::BarrierOptions all;
  all.device = device_;
  backend_->barrier(all)->wait();
  Call call = call_on_window("tensor_deregister");
  call.issue = [window = window_](const Api& api, ncclComm_t comm, cudaStream_t) {
    return PYNCCL_KNOWN(api, ncclCommWindowDeregister)(comm, window);
  };
  backend_->launch(std::move(call), kOfTheGroup, Pace::Awaited)->wait();
  at::Tensor freed;  // without the lock
  auto lane = backend_->lane(device_);
  {
    auto lock = backend_->entered();
    freed = std::move(lane->windows[window_]);
    lane->windows.erase(window_);
  }
  window_ = nullptr, own_ = at::Tensor(), peers_.clear();
}

void Window::check_put(const at::Tensor& tensor, int peer, int64_t offset) const {
  const auto [room, dtype] = peers_[size_t(peer)];
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous(),
                    "put: tensor is not a dense contiguous tensor");
  TORCH_CHECK_VALUE(tensor.device() == device_, "put: tensor is on ", tensor.device(), ", the window on ",
                    device_);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "put: tensor has dtype ", tensor.scalar_type(),
                   ", expected ", dtype, ", which the window of rank ", peer, " has");
  TORCH_CHECK_VALUE(offset >= 0 && offset <= room && tensor.numel() <= room - offset, "put: tensor has ",
                    tensor.numel(), " elements and the offset is ", offset, ", but the window of rank ", peer,
                    " has ", room, " elements");
}

WorkPtr Window::put(const at::Tensor& tensor, int64_t peer, int64_t offset, bool async,
                    const c10d::PutOptions& options) try {
  const int to = checked_peer("put", peer);
  check_put(tensor, to, offset);
  Call call = call_on_window("put");
  call.inputs = call.kept = {tensor};
  call.issue = [=, window = window_, bytes = size_t(offset) * tensor.element_size()](
                   const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return PYNCCL_KNOWN(api, ncclPutSignal)(tensor.data_ptr(), tensor.nbytes(), ncclUint8, to, window, bytes,
                                            0, 0, 0, comm, stream);
  };
  return run(std::move(call), options, async);
} catch (...) {
  return backend_->refused();
}

WorkPtr Window::signal(int64_t peer, bool async, const c10d::SignalOptions& options) try {
  const int to = checked_peer("signal", peer);
  Call call = call_on_window("signal");
  call.issue = [to](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return PYNCCL_KNOWN(api, ncclSignal)(to, 0, 0, 0, comm, stream);
  };
  return run(std::move(call), options, async);
} catch (...) {
  return backend_->refused();
}

WorkPtr Window::wait_signal(int64_t peer, bool async, const c10d::WaitSignalOptions& options) try {
  const int from = checked_peer("wait_signal", peer);
  Call call = call_on_window("wait_signal");
  call.issue = [from](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    ncclWaitSignalDesc_t one{1, from, 0, 0};
    return PYNCCL_KNOWN(api, ncclWaitSignal)(1, &one, comm, stream);
  };
  return run(std::move(call), options, async);
} catch (...) {
  return backend_->refused();
}

at::Tensor Window::map_remote_tensor(int64_t rank) {
  const int own = backend_->getRank();
  TORCH_CHECK_VALUE(checked_peer("map_remote_tensor", rank) == own, "map_remote_tensor: rank is ", rank,
                    ", expected this rank, ", own, ": the memory of others is not mapped; use put");
  TORCH_CHECK(own_.defined(), "map_remote_tensor: the window does not own its tensor; expected owning=True");
  return own_;
}

c10d::WindowAttr Window::get_attr(int64_t peer) {
  checked_peer("get_attr", peer);
  return {};
}

intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor>& tensor) {
  auto window = c10::make_intrusive<Window>(intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this));
  if (tensor) window->tensor_register(*tensor);
  return window;
}

}  // namespace pynccl

#endif
