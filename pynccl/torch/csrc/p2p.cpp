// Messages between two ranks.
#include "backend.hpp"

namespace pynccl {

// A rank can be its own peer on the CPU and, as in NCCL, in a group.
void Backend::check_peer(int peer, const char* argument, c10::Device device) const {
  const bool itself = device.is_cpu() || coalesced_;
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_ && (peer != rank_ || itself), argument, " is ", peer,
                    ", expected a rank from 0 to ", size_ - 1,
                    itself ? c10::str("") : c10::str(" other than this one (", rank_, ")"));
}

std::shared_ptr<Messages> Backend::messages() {
  auto lock = entered();
  // A pair needs no other rank.
  auto cpu = lane(at::kCPU);
  if (!messages_) {
    Names names{here(), size_, named_.ranks};
    messages_ = std::make_shared<Messages>(cpu->api, *stores_, cpu->queue, rank_, std::move(names));
  }
  return messages_;
}

WorkPtr Backend::send(Tensors& tensors, int peer, int tag) try {
  auto& tensor = only(tensors, "send");
  check_peer(peer, "dst", tensor.device());
  return point_to_point(OpType::SEND, tensor, peer, tag);
} catch (...) {
  return refused();
}

WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) try {
  auto& tensor = only(tensors, "recv");
  check_peer(peer, "src", tensor.device());
  return point_to_point(OpType::RECV, tensor, peer, tag);
} catch (...) {
  return refused();
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) try {
  TORCH_CHECK(only(tensors, "recv").is_cpu(), "recv from any source works on cpu tensors: NCCL has none");
  return point_to_point(OpType::RECVANYSOURCE, tensors[0], kAnySource, tag);
} catch (...) {
  return refused();
}

WorkPtr Backend::point_to_point(OpType type, const at::Tensor& tensor, int peer, int tag) {
  at::AutoDispatchBelowADInplaceOrView no_grad;
  bool sends = type == OpType::SEND;
  at::Tensor data = dense(tensor);
  Call call;
  call.type = type, call.device = tensor.device(), call.other = peer;
  call.name = sends ? "send" : peer == kAnySource ? "recvAnySource" : "recv";
  (sends ? call.inputs : call.outputs) = {tensor};
  call.kept = {data};
  if (!sends && !data.is_alias_of(tensor)) call.post = [tensor, data] { tensor.copy_(data); };
  if (!tensor.is_cpu()) return device_message(std::move(call), data, peer);
  TORCH_CHECK_VALUE(tag >= 0, call.name, ": tag is ", tag, ", expected 0 or more");
  auto mail = messages();
  auto lock = entered();
  describe_to_profiler(call);
  TaskPtr task = make_task(call, kOfTheGroup);
  task->post = std::move(call.post);
  task->kept = std::move(call.kept);
  task->source.store(sends ? -1 : peer);
  task->peer = peer;
  auto begin = [=] {
    sends ? mail->send(task, data, peer, tag, Pace::Soon) : mail->receive(task, data, peer, tag, Pace::Soon);
  };
  auto work = work_of(type, call.name, {task});
  if (coalesced_) {
    task->set_recording(true);
    coalesced_->messages.emplace_back(task, begin);
    return work;
  }
  lock.unlock();
  begin();
  return work;
}

// As in ProcessGroupNCCL devices have no tags. Messages in a batch use the group's communicator, others the
// pair's, so that they need no other rank. Not tested on a GPU.
WorkPtr Backend::device_message(Call call, const at::Tensor& data, int peer) {
  bool sends = call.type == OpType::SEND;
  const bool paired = !coalesced_;
  const int to = paired ? int(peer > rank_) : peer;
  call.issue = [=](const Api& api, ncclComm_t comm, cudaStream_t stream) {
    return sends ? api.ncclSend(data.data_ptr(), data.nbytes(), ncclUint8, to, comm, stream)
                 : api.ncclRecv(data.data_ptr(), data.nbytes(), ncclUint8, to, comm, stream);
  };
  if (paired) call.peer = peer;
  return launch(std::move(call), kOfTheGroup, Pace::Now);
}

}  // namespace pynccl
