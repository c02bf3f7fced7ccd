// Point-to-point messages between CPU tensors. Each direction of each pair of ranks, and each tag, has a
// communicator of its own, made when both ends want it: messages of one channel keep their order, and no
// message waits for another channel's. A message is its size, then its data, so that a receiver from any
// source can wait for sizes.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "task.hpp"

namespace pynccl {

struct Link {
  const Api& api;
  std::shared_ptr<StreamPool> pool;
  intrusive_ptr<c10d::Store> store;
};

class Channel : public std::enable_shared_from_this<Channel> {
 public:
  Channel(Link link, std::string key, bool sender)
      : link_(std::move(link)), key_(std::move(key)), sender_(sender) {}

  void open() {
    std::thread([self = shared_from_this()] { self->connect(); }).detach();
  }

  void send(const TaskPtr& task, const at::Tensor& data) {
    auto size = std::make_shared<uint64_t>(data.nbytes());
    when_ready(task, [this, size, data](const TaskPtr& sent) {
      chain_post(*sent, [size] {});
      issue(sent, [&](ncclComm_t comm, cudaStream_t stream) {
        ncclResult_t r = link_.api.ncclSend(size.get(), sizeof *size, ncclUint8, 1, comm, stream);
        return r != ncclSuccess ? r : link_.api.ncclSend(data.data_ptr(), *size, ncclUint8, 1, comm, stream);
      });
    });
  }

  void receive(const TaskPtr& task, const at::Tensor& data) {
    when_ready(task, [this, data](const TaskPtr& received) {
      TaskPtr ahead = std::move(ahead_);
      auto size = ahead ? ahead_size_ : std::make_shared<uint64_t>(0);
      chain_post(*received, [size, ahead, expected = data.nbytes()] { check_size(*size, expected); });
      issue(received, [&](ncclComm_t comm, cudaStream_t stream) {
        ncclResult_t r =
            ahead ? ncclSuccess : link_.api.ncclRecv(size.get(), sizeof *size, ncclUint8, 0, comm, stream);
        return r != ncclSuccess
                   ? r
                   : link_.api.ncclRecv(data.data_ptr(), data.nbytes(), ncclUint8, 0, comm, stream);
      });
    });
  }

  // Whether a message has begun to arrive; asks for its size first.
  bool arrived() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!comm_) return false;
    if (!ahead_) {
      ahead_ = std::make_shared<Task>();
      ahead_->name = "recv";
      ahead_size_ = std::make_shared<uint64_t>(0);
      chain_post(*ahead_, [size = ahead_size_] {});
      issue(ahead_, [&](ncclComm_t comm, cudaStream_t stream) {
        return link_.api.ncclRecv(ahead_size_.get(), sizeof(uint64_t), ncclUint8, 0, comm, stream);
      });
    }
    return ahead_->advance(Milliseconds(0)) && !ahead_->error();
  }

  bool wanted_by_sender() const { return link_.store->check({key_ + "/sender"}); }

  void close(bool abort) {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_.store(true);
    give_up(shut_down());
    if (!comm_) return;
    if (abort)
      link_.api.ncclCommAbort(comm_);
    else
      link_.api.ncclCommDestroy(comm_);
    comm_ = nullptr;
  }

 private:
  using Start = std::function<void(const TaskPtr&)>;

  static void chain_post(Task& task, std::function<void()> check) {
    task.post = [check = std::move(check), rest = std::move(task.post)] {
      check();
      if (rest) rest();
    };
  }

  static void check_size(uint64_t size, uint64_t expected) {
    TORCH_CHECK(size == expected, "recv: the tensor has ", expected,
                " bytes, but the message that was sent has ", size);
  }

  // Both ends say in the store that they are there, so that neither waits in NCCL for the other.
  void connect() {
    try {
      ncclUniqueId id;
      if (sender_) {
        link_.api.check(link_.api.ncclGetUniqueId(&id), "ncclGetUniqueId");
        const char* bytes = id.internal;
        link_.store->set(key_ + "/sender", std::vector<uint8_t>(bytes, bytes + sizeof id));
      } else {
        link_.store->set(key_ + "/receiver", std::vector<uint8_t>{1});
      }
      if (!wait_for_peer()) return;
      if (!sender_) {
        auto bytes = link_.store->get(key_ + "/sender");
        std::copy(bytes.begin(), bytes.end(), id.internal);
      }
      ncclComm_t comm = nullptr;
      link_.api.check(link_.api.ncclCommInitRank(&comm, 2, id, sender_ ? 0 : 1), "ncclCommInitRank");
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_.load()) {
        link_.api.ncclCommAbort(comm);
        return;
      }
      comm_ = comm;
      for (auto& [task, start] : waiting_) attempt(task, start);
      waiting_.clear();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      give_up(std::current_exception());
    }
  }

  bool wait_for_peer() {
    auto pause = std::chrono::microseconds(100);
    while (!link_.store->check({key_ + (sender_ ? "/receiver" : "/sender")})) {
      if (closed_.load()) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(20000));
    }
    return !closed_.load();
  }

  void when_ready(const TaskPtr& task, Start start) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_)
      task->fail(broken_);
    else if (comm_)
      attempt(task, start);
    else
      waiting_.emplace_back(task, std::move(start));
  }

  static void attempt(const TaskPtr& task, const Start& start) {
    try {
      start(task);
    } catch (...) {
      task->fail(std::current_exception());
    }
  }

  template <class Calls>
  void issue(const TaskPtr& task, Calls calls) {
    cudaStream_t stream = link_.pool->take(comm_);
    try {
      link_.api.check(grouped(link_.api, [&] { return calls(comm_, stream); }), task->name, comm_);
    } catch (...) {
      link_.pool->give_back(stream);
      throw;
    }
    task->issued(link_.api, comm_, stream, link_.pool);
  }

  void give_up(std::exception_ptr error) {
    broken_ = error;
    for (auto& [task, start] : waiting_) task->fail(error);
    waiting_.clear();
  }

  Link link_;
  std::string key_;
  bool sender_;
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> closed_{false};
  std::exception_ptr broken_;
  std::deque<std::pair<TaskPtr, Start>> waiting_;
  TaskPtr ahead_;
  std::shared_ptr<uint64_t> ahead_size_;
};

}  // namespace pynccl
