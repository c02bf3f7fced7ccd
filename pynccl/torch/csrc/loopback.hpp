// Messages of a rank to itself: for each tag the oldest send meets the oldest receive.
#pragma once

#include <cstring>

#include "task.hpp"

namespace pynccl {

inline void check_message_size(uint64_t size, uint64_t expected) {
  TORCH_CHECK(size == expected, "recv: the tensor has ", expected,
              " bytes, but the message that was sent has ", size);
}

class Loopback {
 public:
  void send(int tag, const TaskPtr& task, const at::Tensor& data) { add(tag, &Way::sent, task, data); }
  void receive(int tag, const TaskPtr& task, const at::Tensor& data) { add(tag, &Way::awaited, task, data); }

 private:
  struct Half {
    TaskPtr task;
    at::Tensor data;
  };
  struct Way {
    std::deque<Half> sent, awaited;
  };

  void add(int tag, std::deque<Half> Way::* side, const TaskPtr& task, const at::Tensor& data) {
    Half from, to;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Way& way = ways_[tag];
      (way.*side).push_back({task, data});
      if (!ready(way.sent) || !ready(way.awaited)) return;
      from = std::move(way.sent.front()), to = std::move(way.awaited.front());
      way.sent.pop_front(), way.awaited.pop_front();
    }
    // Callbacks run here, which may send again.
    deliver(from, to);
  }

  // What the group's end has failed is nobody's message any more.
  static bool ready(std::deque<Half>& halves) {
    while (!halves.empty() && halves.front().task->done()) halves.pop_front();
    return !halves.empty();
  }

  static void deliver(const Half& from, const Half& to) {
    try {
      check_message_size(from.data.nbytes(), to.data.nbytes());
      if (from.data.nbytes()) std::memmove(to.data.data_ptr(), from.data.data_ptr(), from.data.nbytes());
      to.task->succeed();
    } catch (...) {
      to.task->fail(std::current_exception());
    }
    from.task->succeed();
  }

  std::mutex mutex_;
  std::map<int, Way> ways_;
};

}  // namespace pynccl
