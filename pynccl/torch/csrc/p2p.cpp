// Messages between two ranks.
#include "backend.hpp"

namespace pynccl {

void Backend::check_peer(int peer, const char* argument) const {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_, argument, " is ", peer, ", expected a rank from 0 to ",
                    size_ - 1);
}

std::shared_ptr<Channel> Backend::channel(int source, int destination, int tag) {
  auto lock = entered();
  std::string key = c10::str("pynccl/p2p/", source, "/", destination, "/", tag);
  // The other ranks are not needed for it.
  Lane& cpu = lane(at::kCPU, false);
  auto& found = channels_[key];
  if (!found) {
    found = std::make_shared<Channel>(Link{*cpu.api, cpu.pool, store_}, key, source == rank_);
    found->open();
  }
  return found;
}

WorkPtr Backend::send(Tensors& tensors, int peer, int tag) try {
  auto& tensor = only(tensors, "send");
  check_peer(peer, "dst");
  return point_to_point(OpType::SEND, tensor, peer, tag);
} catch (...) {
  return refused();
}

WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) try {
  auto& tensor = only(tensors, "recv");
  check_peer(peer, "src");
  return point_to_point(OpType::RECV, tensor, peer, tag);
} catch (...) {
  return refused();
}

WorkPtr Backend::point_to_point(OpType type, const at::Tensor& tensor, int peer, int tag) {
  at::AutoDispatchBelowADInplaceOrView no_grad;
  bool sends = type == OpType::SEND;
  at::Tensor data = tensor.contiguous();
  Call call;
  call.type = type, call.name = sends ? "send" : "recv", call.device = tensor.device();
  (sends ? call.inputs : call.outputs) = {tensor};
  call.kept = {data};
  if (!sends && !data.is_alias_of(tensor)) call.post = [tensor, data] { tensor.copy_(data); };
  if (!tensor.is_cpu()) {
    // As with the stock backend, tags do not exist on devices.
    call.issue = [=](const Api& api, ncclComm_t comm, cudaStream_t stream) {
      return sends ? api.ncclSend(data.data_ptr(), data.nbytes(), ncclUint8, peer, comm, stream)
                   : api.ncclRecv(data.data_ptr(), data.nbytes(), ncclUint8, peer, comm, stream);
    };
    return launch(std::move(call), Milliseconds(-1));
  }
  TaskPtr task = make_task(call, Milliseconds(-1));
  task->post = std::move(call.post);
  task->kept = std::move(call.kept);
  task->source.store(sends ? -1 : peer);
  auto begin = [=, this] {
    if (peer == rank_) return sends ? loopback_.send(tag, task, data) : loopback_.receive(tag, task, data);
    auto way = sends ? channel(rank_, peer, tag) : channel(peer, rank_, tag);
    sends ? way->send(task, data) : way->receive(task, data);
  };
  auto lock = entered();
  if (coalesced_) {
    task->set_recording(true);
    coalesced_->messages.emplace_back(task, begin);
  } else {
    lock.unlock();
    begin();
    lock.lock();
  }
  return work_of(type, call.name, {task});
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) try {
  TORCH_CHECK(only(tensors, "recv").is_cpu(), "recv from any source works on cpu tensors: NCCL has none");
  at::AutoDispatchBelowADInplaceOrView no_grad;
  at::Tensor tensor = tensors[0], data = tensor.contiguous();
  Call call;
  call.type = OpType::RECVANYSOURCE, call.name = "recvAnySource", call.outputs = {tensor};
  auto lock = entered();
  lane(at::kCPU, false);
  TaskPtr task = make_task(call, Milliseconds(-1));
  task->kept = {data};
  if (!data.is_alias_of(tensor)) task->post = [tensor, data] { tensor.copy_(data); };
  any_[tag].push_back(task);
  auto self = intrusive_ptr<Backend>::reclaim_copy(this);
  std::thread([self, task, data, tag] { self->receive_any(task, data, tag); }).detach();
  return work_of(call.type, call.name, {task});
} catch (...) {
  return refused();
}

// Opens channels as senders come, and takes the first message whose size arrives.
void Backend::receive_any(const TaskPtr& task, const at::Tensor& data, int tag) {
  try {
    for (auto pause = std::chrono::microseconds(50); !ended_.load() && !task->done();) {
      for (int source = 0; source < size_; ++source) {
        auto lock = entered();
        if (ended_.load()) return;
        auto& queue = any_[tag];
        while (!queue.empty() && queue.front()->done()) queue.pop_front();
        if (source == rank_ || queue.empty() || queue.front() != task) continue;
        std::string key = c10::str("pynccl/p2p/", source, "/", rank_, "/", tag);
        if (!channels_.count(key) && !store_->check({key + "/sender"})) continue;
        auto way = channel(source, rank_, tag);
        if (!way->arrived()) continue;
        task->source.store(source);
        queue.pop_front();
        way->receive(task, data);
        return;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(2000));
    }
  } catch (...) {
    task->fail(std::current_exception());
  }
}

}  // namespace pynccl
