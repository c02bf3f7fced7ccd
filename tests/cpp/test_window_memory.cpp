// Collectives on memory that lies in windows: where peers map it, they use it without the owner's help.
#include <optional>

#include "worlds.hpp"

using namespace testing;

namespace {

// Several blocks, and not a multiple of one; in the wider types several slices, too.
constexpr size_t kCount = size_t(scaled(300000, 300000, 100000));
constexpr size_t kRoom = 8 * kCount * 8;

// How peers come to map memory: a window, or a registration, which they map when they hear of it.
enum class As { Window, Registered };
constexpr As kKinds[] = {As::Window, As::Registered};

// Memory of a rank that is shared, as a whole or the first part.
class Shared {
 public:
  Shared(World& w, As as, size_t bytes) : Shared(w, as, bytes, bytes) {}
  Shared(World& w, As as, size_t bytes, size_t part) : memory(w.way.mapped, bytes), comm_(w.comm) {
    if (as == As::Window) OK(ncclCommWindowRegister(comm_, memory.floats(), part, &win_, 0));
    if (as == As::Registered) OK(ncclCommRegister(comm_, memory.floats(), part, &handle_));
    // The offers arrive with the first, the answers with the second.
    for (int i = 0; i < 2 && as == As::Registered; ++i) OK(pyncclCpuQuiet(comm_));
  }
  ~Shared() { close(); }
  void close() {
    if (win_) OK(ncclCommWindowDeregister(comm_, win_));
    if (handle_) OK(ncclCommDeregister(comm_, handle_));
    win_ = nullptr;
    handle_ = nullptr;
  }
  char* bytes() const { return reinterpret_cast<char*>(memory.floats()); }

  Memory memory;

 private:
  ncclComm_t comm_;
  ncclWindow_t win_ = nullptr;
  void* handle_ = nullptr;
};

// The value of an element of a rank's input: small, so that sums are exact in every type.
int value(int rank, size_t i) { return int((i * 7 + size_t(rank) * 3) % 5) + 1; }

template <class T>
struct Case {
  World& w;
  ncclDataType_t type;
  T *send, *recv;

  // Peers may read a buffer until the last call has ended.
  void fill(T* at, size_t count, int rank, size_t from = 0) const {
    OK(synchronize(w.comm));
    for (size_t i = 0; i < count; ++i) at[i] = T(value(rank, from + i));
  }
  template <class Want>
  size_t wrong(size_t count, Want want, const T* at = nullptr) const {
    OK(synchronize(w.comm));
    if (!at) at = recv;
    size_t n = 0;
    for (size_t i = 0; i < count; ++i) n += at[i] != T(want(i));
    return n;
  }
  int total(size_t i) const {
    int sum = 0;
    for (int q = 0; q < w.nranks; ++q) sum += value(q, i);
    return sum;
  }

  // Each collective once out of place and, where NCCL has it, once in place.
  void all() const {
    const size_t n = size_t(w.nranks), mine = size_t(w.rank) * kCount;
    auto sum = [&](size_t i) { return total(i); };
    auto part = [&](size_t i) { return value(int(i / kCount), i % kCount); };
    auto shared = [&](size_t i) { return total(mine + i); };
    auto turned = [&](size_t i) { return value(int(i / kCount), mine + i % kCount); };

    fill(send, kCount, w.rank);
    OK(ncclAllReduce(send, recv, kCount, type, ncclSum, w.comm, nullptr));
    CHECK_EQ(wrong(kCount, sum), size_t(0));
    fill(recv, kCount, w.rank);
    OK(ncclAllReduce(recv, recv, kCount, type, ncclSum, w.comm, nullptr));
    CHECK_EQ(wrong(kCount, sum), size_t(0));

    OK(ncclAllGather(send, recv, kCount, type, w.comm, nullptr));
    CHECK_EQ(wrong(n * kCount, part), size_t(0));
    memset(recv, 0, n * kCount * sizeof(T));
    fill(recv + mine, kCount, w.rank);
    OK(ncclAllGather(recv + mine, recv, kCount, type, w.comm, nullptr));
    CHECK_EQ(wrong(n * kCount, part), size_t(0));

    for (int root : {0, w.nranks - 1}) {
      OK(ncclReduce(send, recv, kCount, type, ncclSum, root, w.comm, nullptr));
      if (w.rank == root) CHECK_EQ(wrong(kCount, sum), size_t(0));
      OK(ncclBroadcast(send, recv, kCount, type, root, w.comm, nullptr));
      CHECK_EQ(wrong(kCount, [&](size_t i) { return value(root, i); }), size_t(0));
      OK(ncclGather(send, recv, kCount, type, root, w.comm, nullptr));
      if (w.rank == root) CHECK_EQ(wrong(n * kCount, part), size_t(0));
    }

    fill(send, n * kCount, w.rank);
    OK(ncclReduceScatter(send, recv, kCount, type, ncclSum, w.comm, nullptr));
    CHECK_EQ(wrong(kCount, shared), size_t(0));
    OK(ncclAlltoAll(send, recv, kCount, type, w.comm, nullptr));
    CHECK_EQ(wrong(n * kCount, turned), size_t(0));
    OK(ncclScatter(send, recv, kCount, type, 1, w.comm, nullptr));
    CHECK_EQ(wrong(kCount, [&](size_t i) { return value(1, mine + i); }), size_t(0));
    OK(ncclReduceScatter(send, send + mine, kCount, type, ncclSum, w.comm, nullptr));
    CHECK_EQ(wrong(kCount, shared, send + mine), size_t(0));
  }
};

template <class T>
void all_collectives(World& w, ncclDataType_t type, char* send, char* recv) {
  Case<T>{w, type, reinterpret_cast<T*>(send), reinterpret_cast<T*>(recv)}.all();
}

// Runs a body with 3 ranks on every way, for both kinds of sharing.
void for_all(const std::function<void(World&, As)>& body) {
  for (As as : kKinds) on_every_way(3, [&](World& w) { body(w, as); });
}

TEST_CASE("all collectives on shared memory") {
  for_all([](World& w, As as) {
    Shared m(w, as, kRoom);
    all_collectives<float>(w, ncclFloat32, m.bytes(), m.bytes() + kRoom / 2);
    all_collectives<double>(w, ncclFloat64, m.bytes() + 8, m.bytes() + kRoom / 2 + 16);
    all_collectives<int8_t>(w, ncclInt8, m.bytes() + 1, m.bytes() + kRoom / 2 + 3);
    all_collectives<int64_t>(w, ncclInt64, m.bytes() + kRoom / 2, m.bytes());
  });
}

// Whether a peer reads a buffer in place depends on each pair and call.
TEST_CASE("buffers that are only partly shared") {
  for_all([](World& w, As as) {
    const size_t half = kRoom / 2, inside = kCount * sizeof(float) / 4096 * 4096;
    std::vector<char> outside(kRoom);
    {
      Shared m(w, as, kRoom);
      auto at = [&](bool in, size_t offset) { return (in ? m.bytes() : outside.data()) + offset; };
      for (int rank = 0; rank < 3; ++rank) {  // the only one whose buffers are outside
        all_collectives<float>(w, ncclFloat32, at(w.rank != rank, 0), at(w.rank != rank, half));
        all_collectives<float>(w, ncclFloat32, at(w.rank == rank, 0), at(true, half));
        all_collectives<float>(w, ncclFloat32, at(true, 0), at(w.rank == rank, half));
      }
    }
    Shared m(w, as, kRoom, inside);  // less than one buffer
    all_collectives<float>(w, ncclFloat32, m.bytes(), m.bytes() + half);
    all_collectives<float>(w, ncclFloat32, m.bytes() + half, m.bytes());
  });
}

// Deregistration is local: ranks whose windows differ exchange data as without windows.
TEST_CASE("memory that only some ranks still share") {
  for_all([](World& w, As as) {
    for (int closed = 0; closed < 3; ++closed) {
      Shared m(w, as, kRoom), other(w, as, kRoom);
      auto run = [&] {
        all_collectives<int8_t>(w, ncclInt8, m.bytes(), m.bytes() + kRoom / 2);
        all_collectives<int8_t>(w, ncclInt8, m.bytes(), other.bytes());
      };
      run();
      if (w.rank == closed) m.close();
      run();
      if (w.rank != closed) other.close();
      run();
    }
  });
}

// The owner deregisters memory while peers still read it; it stays until they have finished.
TEST_CASE("memory that is deregistered while calls run") {
  for_all([](World& w, As as) {
    for (int round = 0; round < 10; ++round) {
      Shared m(w, as, 3 * kCount * sizeof(float));
      float* x = m.memory.floats();
      for (size_t i = 0; i < kCount; ++i) x[i] = float(w.rank + round);
      for (int call = 0; call < 3; ++call)
        OK(ncclAllReduce(x, x + kCount, kCount, ncclFloat32, ncclSum, w.comm, nullptr));
      if (w.rank == round % 3) m.close();
      OK(ncclAllReduce(x, x + 2 * kCount, kCount, ncclFloat32, ncclSum, w.comm, nullptr));
      m.close();
      OK(synchronize(w.comm));
      for (int out : {1, 2})
        CHECK_EQ(wrong(x + size_t(out) * kCount, kCount, float(3 + 3 * round)), size_t(0));
    }
  });
}

// Rank 0 has announced its call and does nothing afterwards. Rank 1 needs no more: it reads the mapping. With
// the rings, for memory that is not shared, it would wait.
TEST_CASE("a broadcast from mapped memory needs no help of its root") {
  constexpr size_t kBytes = size_t(16) << 20;
  for (std::optional<As> as : {std::optional<As>(As::Window), std::optional<As>(As::Registered), {}}) {
    testing::Meeting meet(2);
    with_world(kWays[2], 2, [&](World& w) {
      Shared m(w, as.value_or(As::Registered), kBytes);
      if (!as) m.close();
      float* x = m.memory.floats();
      cudaStream_t stream = nullptr;
      memset(x, w.rank ? 0 : 7, kBytes);
      OK(pyncclCpuStreamCreateWithFlags(&stream, 2));  // nobody runs it while its creator does not wait
      if (w.rank == 0) {
        OK(ncclBroadcast(x, x, kBytes, ncclInt8, 0, w.comm, stream));
        RESULT(synchronize(w.comm, stream, 20), ncclInProgress);
        CHECK(meet());
        CHECK(meet());
        OK(synchronize(w.comm, stream));
      } else {
        CHECK(meet());
        OK(ncclBroadcast(x, x, kBytes, ncclInt8, 0, w.comm, stream));
        RESULT(synchronize(w.comm, stream, as ? 30000 : 300), as ? ncclSuccess : ncclInProgress);
        CHECK(meet());
        OK(synchronize(w.comm, stream));
        CHECK_EQ(std::count(m.bytes(), m.bytes() + kBytes, 7), ptrdiff_t(kBytes));
      }
      OK(pyncclCpuStreamDestroy(stream));
    });
  }
}

TEST_CASE("groups of calls of several communicators over one memory") {
  on_every_way(3, [](World& w) {
    ncclComm_t child = nullptr;
    OK(ncclCommSplit(w.comm, 0, 2 - w.rank, &child, nullptr));  // the ranks in reverse
    Memory memory(w.way.mapped, 6 * kCount * sizeof(float));
    ncclWindow_t one = nullptr, two = nullptr;
    float* x = memory.floats();
    OK(ncclCommWindowRegister(w.comm, x, 6 * kCount * sizeof(float), &one, 0));
    OK(ncclCommWindowRegister(child, x, 6 * kCount * sizeof(float), &two, 0));
    for (size_t i = 0; i < kCount; ++i) x[i] = float(w.rank + 1);
    for (int round = 0; round < 5; ++round) {
      OK(ncclGroupStart());
      OK(ncclAllReduce(x, x + kCount, kCount, ncclFloat32, ncclSum, w.comm, nullptr));
      OK(ncclBroadcast(x, x + 2 * kCount, kCount, ncclFloat32, 0, child, nullptr));
      OK(ncclAllGather(x, x + 3 * kCount, kCount, ncclFloat32, w.comm, nullptr));
      OK(ncclGroupEnd());
      OK(synchronize(w.comm));
      OK(synchronize(child));
      CHECK_EQ(wrong(x + kCount, kCount, 6), size_t(0));
      CHECK_EQ(wrong(x + 2 * kCount, kCount, 3), size_t(0));
      for (size_t q = 0; q < 3; ++q) CHECK_EQ(wrong(x + (3 + q) * kCount, kCount, float(q + 1)), size_t(0));
      float ready = 1;  // nobody starts the next round before all have read
      OK(sum(&ready, 1, w.comm));
      OK(synchronize(w.comm));
    }
    OK(ncclCommWindowDeregister(w.comm, one));
    OK(ncclCommWindowDeregister(child, two));
    OK(ncclCommDestroy(child));
  });
}

TEST_CASE("a rank that dies while its memory is read") {
  for (const Way& way : kWays)
    for (int round = 0; round < 8 && way.processes; ++round)
      with_a_victim(way, [&](World& w) {
        Shared m(w, kKinds[round % 2], 8 * kCount * sizeof(float));
        if (w.rank == 1)
          std::thread([=] {
            usleep(useconds_t(3000 * (round / 2)));
            kill(getpid(), SIGKILL);
          }).detach();
        ncclResult_t got = ncclSuccess;
        for (int i = 0; i < 100000 && got == ncclSuccess; ++i) {
          got = sum(m.memory.floats(), 8 * kCount, w.comm);
          if (got == ncclSuccess) got = synchronize(w.comm);
        }
        CHECK_EQ(got, ncclRemoteError);
        m.close();
      });
}

// Whoever ends a communicator may use its memory afterwards, whatever the peers were doing with it.
TEST_CASE("no peer writes after the end") {
  constexpr size_t kBytes = size_t(32) << 20;
  for (const char* how : {"abort", "revoke"})
    on_every_way(2, [&](World& w) {
      ncclComm_t child = nullptr;
      OK(ncclCommSplit(w.comm, 0, 0, &child, nullptr));
      Memory memory(w.way.mapped, kBytes);
      ncclWindow_t win = nullptr;
      OK(ncclCommWindowRegister(child, memory.floats(), kBytes, &win, 0));
      std::thread ender([&] {
        if (w.rank == 0) return;
        usleep(5000);
        if (*how == 'a') OK(ncclCommAbort(child));
        if (*how == 'r') OK(ncclCommRevoke(child, NCCL_REVOKE_DEFAULT));
        memset(memory.floats(), 1, kBytes);
      });
      for (ncclResult_t got = ncclSuccess; got == ncclSuccess && w.rank == 0;) {
        got = sum(memory.floats(), kBytes / sizeof(float), child);
        if (got == ncclSuccess) got = synchronize(child);
      }
      if (w.rank == 1) sum(memory.floats(), kBytes / sizeof(float), child);
      ender.join();
      if (w.rank == 1) {
        usleep(50000);
        std::vector<char> want(kBytes, 1);
        CHECK_EQ(memcmp(memory.floats(), want.data(), kBytes), 0);
      }
      if (w.rank == 0 || *how == 'r') OK(ncclCommAbort(child));
      float x = 1;  // nobody frees what the other may still read
      OK(sum(&x, 1, w.comm));
      OK(synchronize(w.comm));
    });
}

TEST_CASE("calls on shared memory leave nothing behind") {
  with_world(kWays[2], 2, [](World& w) {
    auto once = [&] {
      Shared m(w, As::Window, 1 << 20), other(w, As::Registered, 1 << 20);
      OK(sum(other.memory.floats(), 1 << 18, w.comm));
      OK(sum(m.memory.floats(), 1 << 18, w.comm));
      OK(synchronize(w.comm));
    };
    once();
    Has before = process_has();
    for (int i = 0; i < 50; ++i) once();
    for (int i = 0; i < 2; ++i) OK(pyncclCpuQuiet(w.comm));  // the ends of registrations arrive
    CHECK(settles_to(before));
    CHECK(process_has().kib < before.kib + 20000);
  });
}

}  // namespace
