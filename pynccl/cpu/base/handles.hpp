// Handles given to callers. A handle names a slot, the slot's generation, the kind of object and the process
// that made it. It is never dereferenced, so stale, foreign and invented values are recognised. A lookup
// returns shared ownership: the object lives as long as the call that looked it up.
#pragma once

#include <sched.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.hpp"
#include "base/log.hpp"

namespace pncpu {

enum class HandleKind : uint64_t { Comm = 1, Stream, Event, Window, Registration, Hold };

// Why a value is not a live handle.
enum class HandleState { Live, Ended, Inherited, Unknown };

template <class T>
class HandleTable {
 public:
  explicit HandleTable(HandleKind kind) : kind_(kind) {}

  void* add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t index = free_;
    if (index != kNone)
      free_ = slot(index)->next_free;
    else
      index = grow();
    Slot* s = slot(index);
    s->object = std::move(object);
    uint64_t state = s->state.load(std::memory_order_relaxed) | kLive;
    s->state.store(state, std::memory_order_release);
    return encode(index, state >> kGenerationShift);
  }

  // nullptr if the handle is not live; state() tells why.
  std::shared_ptr<T> find(const void* handle) const {
    Slot* s = pin(handle, [](uint64_t state) { return state + 1; });
    if (!s) return nullptr;
    std::shared_ptr<T> object = s->object;
    s->state.fetch_sub(1, std::memory_order_release);
    return object;
  }

  std::vector<std::shared_ptr<T>> all() const {
    std::vector<std::shared_ptr<T>> live;
    for (uint64_t i = 0; i < used_.load(std::memory_order_acquire); ++i) {
      uint64_t state = slot(i)->state.load(std::memory_order_acquire);
      if (state & kLive)
        if (auto object = find(encode(i, state >> kGenerationShift))) live.push_back(std::move(object));
    }
    return live;
  }

  // Ends the handle. Only one of several callers gets the object.
  std::shared_ptr<T> take(const void* handle) {
    Slot* s = pin(handle, [](uint64_t state) { return state & ~kLive; });
    if (!s) return nullptr;
    // Wait for lookups that copy the shared_ptr.
    while (s->state.load(std::memory_order_acquire) & kPins) sched_yield();
    std::shared_ptr<T> object = std::move(s->object);
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t generation = (s->state.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
    if (generation >> kGenerationBits) return object;  // the slot is never reused
    s->state.store(generation << kGenerationShift, std::memory_order_release);
    s->next_free = free_;
    free_ = index_of(handle);
    return object;
  }

  HandleState state(const void* handle) const {
    uint64_t value = reinterpret_cast<uintptr_t>(handle);
    if (value >> kKindShift != uint64_t(kind_)) return HandleState::Unknown;
    if (epoch_of(handle) != (process_epoch() & kEpochMask)) return HandleState::Inherited;
    const Slot* s =
        index_of(handle) < used_.load(std::memory_order_acquire) ? slot(index_of(handle)) : nullptr;
    if (!s) return HandleState::Unknown;
    uint64_t state = s->state.load(std::memory_order_acquire), generation = state >> kGenerationShift;
    if (generation_of(handle) > generation) return HandleState::Unknown;
    if (generation_of(handle) < generation) return HandleState::Ended;
    return state & kLive ? HandleState::Live : HandleState::Ended;
  }

 private:
  // A slot's state: its generation, whether it is live, and how many lookups copy its object right now.
  static constexpr uint64_t kPins = 0x7fffffff, kLive = 0x80000000;
  static constexpr int kGenerationShift = 32;
  // A handle: kind, the low bits of the process's epoch, index, generation. No address looks like one.
  static constexpr int kGenerationBits = 20, kIndexBits = 28, kEpochBits = 8;
  static constexpr int kEpochShift = kGenerationBits + kIndexBits, kKindShift = kEpochShift + kEpochBits;
  static constexpr uint64_t kEpochMask = (1 << kEpochBits) - 1, kNone = uint64_t(1) << kIndexBits;
  static constexpr uint64_t kFirstBlock = 256;  // each block of slots is as large as all before it
  static constexpr int kBlocks = 21;

  struct Slot {
    std::atomic<uint64_t> state{0};
    std::shared_ptr<T> object;
    uint64_t next_free = kNone;
  };

  static uint64_t generation_of(const void* handle) {
    return reinterpret_cast<uintptr_t>(handle) & ((1 << kGenerationBits) - 1);
  }
  static uint64_t index_of(const void* handle) {
    return (reinterpret_cast<uintptr_t>(handle) >> kGenerationBits) & ((uint64_t(1) << kIndexBits) - 1);
  }
  static uint64_t epoch_of(const void* handle) {
    return (reinterpret_cast<uintptr_t>(handle) >> kEpochShift) & kEpochMask;
  }
  void* encode(uint64_t index, uint64_t generation) const {
    uint64_t epoch = process_epoch() & kEpochMask;
    return reinterpret_cast<void*>(uint64_t(kind_) << kKindShift | epoch << kEpochShift |
                                   index << kGenerationBits | generation);
  }

  static int block_of(uint64_t index) {
    return index < kFirstBlock ? 0 : 64 - __builtin_clzll(index / kFirstBlock);
  }
  static uint64_t start_of(int block) { return block == 0 ? 0 : kFirstBlock << (block - 1); }
  static uint64_t size_of(int block) { return block == 0 ? kFirstBlock : start_of(block); }

  Slot* slot(uint64_t index) const {
    int block = block_of(index);
    return blocks_[block].load(std::memory_order_acquire) + (index - start_of(block));
  }

  // The index of a new slot.
  uint64_t grow() {
    uint64_t index = used_.load(std::memory_order_relaxed);
    if (index == kNone) throw std::bad_alloc();
    int block = block_of(index);
    if (!blocks_[block].load(std::memory_order_relaxed))
      blocks_[block].store(new Slot[size_of(block)], std::memory_order_release);
    used_.store(index + 1, std::memory_order_release);
    return index;
  }

  // Changes the state of the slot behind a live handle.
  template <class Change>
  Slot* pin(const void* handle, Change change) const {
    if (state(handle) != HandleState::Live) return nullptr;
    Slot* s = slot(index_of(handle));
    uint64_t state = s->state.load(std::memory_order_acquire);
    do {
      if (!(state & kLive) || state >> kGenerationShift != generation_of(handle)) return nullptr;
    } while (!s->state.compare_exchange_weak(state, change(state), std::memory_order_acq_rel));
    return s;
  }

  const HandleKind kind_;
  std::mutex mutex_;
  uint64_t free_ = kNone;
  std::atomic<uint64_t> used_{0};
  std::atomic<Slot*> blocks_[kBlocks] = {};
};

// The name of a kind of object and of the function that creates its handles, for messages.
template <class T>
struct HandleTraits;  // kind, name, maker

template <class T>
HandleTable<T>& handles() {
  struct Table : HandleTable<T> {
    Table() : HandleTable<T>(HandleTraits<T>::kind) {}
  };
  return per_process<Table>();
}

// fail() for a handle that is not live.
template <class T>
ncclResult_t refuse_handle(const void* handle, const char* function) {
  using Traits = HandleTraits<T>;
  if (!handle) return fail_in(function, ncclInvalidArgument, "%s is NULL", Traits::name);
  switch (handles<T>().state(handle)) {
    case HandleState::Inherited:
      return fail_in(function, ncclInvalidArgument,
                     "%s %p belongs to the parent process: a forked child cannot use it", Traits::name,
                     handle);
    case HandleState::Unknown:
      return fail_in(function, ncclInvalidArgument, "%s %p was not created by %s", Traits::name, handle,
                     Traits::maker);
    default:
      return fail_in(function, ncclInvalidArgument, "%s %p has been destroyed", Traits::name, handle);
  }
}

// The object behind a live handle, else nullptr after fail().
template <class T>
std::shared_ptr<T> find_handle(const void* handle, const char* function) {
  std::shared_ptr<T> object = handles<T>().find(handle);
  if (!object) refuse_handle<T>(handle, function);
  return object;
}

}  // namespace pncpu
