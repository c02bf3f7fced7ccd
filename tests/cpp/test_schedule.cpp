// Operations without communicators: all ranks of a world in one process, one thread that makes their steps in
// random order, over each transport and over pipes that take a few bytes at a time. What a rank leaves behind
// when it is done is overwritten at once, so that a peer which still needs it is found out.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "base/fork.hpp"
#include "helpers.hpp"
#include "ops/collectives.hpp"
#include "ops/p2p.hpp"
#include "service/socket.hpp"
#include "transport/segment.hpp"

using namespace testing;
using namespace pncpu;

namespace {

// The nth allocation from now fails; none when negative.
thread_local int64_t failing_allocation = -1;

void* allocate(size_t bytes) {
  if (failing_allocation >= 0 && failing_allocation-- == 0) throw std::bad_alloc();
  void* p = malloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

// Not inlined: the compiler would take the pairs of new and free for mistakes.
#define HEAP __attribute__((noinline))
HEAP void* operator new(size_t bytes) { return allocate(bytes); }
HEAP void* operator new[](size_t bytes) { return allocate(bytes); }
HEAP void operator delete(void* p) noexcept { free(p); }
HEAP void operator delete[](void* p) noexcept { free(p); }
HEAP void operator delete(void* p, size_t) noexcept { free(p); }
HEAP void operator delete[](void* p, size_t) noexcept { free(p); }

namespace {

using Random = std::mt19937_64;

size_t below(Random& random, size_t n) { return size_t(random() % n); }

// A pipe in this process that takes and gives a few bytes at a time.
class Trickle final : public Pipe {
 public:
  using Bytes = std::shared_ptr<std::deque<char>>;
  Trickle(Bytes out, Bytes in, size_t room, uint64_t seed)
      : out_(std::move(out)), in_(std::move(in)), room_(room), random_(seed) {}

  bool put(const void* a, size_t a_bytes, const void* b, size_t b_bytes) override {
    if (out_->size() + a_bytes + b_bytes > room_ || below(random_, 3) == 0) return false;
    append(a, a_bytes);
    append(b, b_bytes);
    return true;
  }
  size_t write(const void* data, size_t bytes) override {
    bytes = some(std::min(bytes, room_ - std::min(room_, out_->size())));
    append(data, bytes);
    return bytes;
  }
  bool flush() override { return true; }
  size_t readable() override { return in_->size(); }
  bool reserve(size_t bytes) override { return bytes <= room_; }
  Span peek() override {
    contiguous_.assign(in_->begin(), in_->end());
    return {contiguous_.data(), contiguous_.size()};
  }
  void copy_out(size_t skip, void* to, size_t bytes) override {
    std::copy_n(in_->begin() + ptrdiff_t(skip), bytes, static_cast<char*>(to));
  }
  void consume(size_t bytes) override { in_->erase(in_->begin(), in_->begin() + ptrdiff_t(bytes)); }
  size_t read(void* to, size_t bytes) override {
    bytes = some(std::min(bytes, readable()));
    copy_out(0, to, bytes);
    consume(bytes);
    return bytes;
  }
  bool idle() override { return out_->empty() && in_->empty(); }

 private:
  size_t some(size_t most) { return most ? 1 + below(random_, most) : 0; }
  void append(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    out_->insert(out_->end(), from, from + bytes);
  }
  Bytes out_, in_;
  size_t room_;
  Random random_;
  std::vector<char> contiguous_;
};

enum class Wire { Plain, Kernel, Rings, Sockets, Few, Mixed };
constexpr Wire kWires[] = {Wire::Plain, Wire::Kernel, Wire::Rings, Wire::Sockets, Wire::Few, Wire::Mixed};

struct Shape {
  int nranks = 2;
  Wire wire = Wire::Plain;
  size_t inline_bytes = 256, block_bytes = 4096, ring_bytes = 8192;
  uint64_t seed = 1;
  int hosts = 1;  // between which the wire is Sockets; rank r is on host r % hosts
  size_t shown_bytes = 0;
  // Ranks of a host share memory, so others have hosts of their own.
  int host(int rank) const {
    bool apart = wire == Wire::Sockets || wire == Wire::Few;
    return rank % (apart ? nranks : wire == Wire::Mixed ? std::max(hosts, 2) : hosts);
  }
};

struct Rank {
  std::unique_ptr<Segment> segment;
  std::vector<std::unique_ptr<Link>> links;
  Context context;
  std::unique_ptr<Coll> coll;
  std::unique_ptr<P2p> p2p;
  uint64_t seq = 0;
  ncclResult_t error = ncclSuccess;
  std::string text;
};

class World {
 public:
  explicit World(const Shape& shape) : shape_(shape), random(shape.seed), ranks(size_t(shape.nranks)) {
    nonce_[0] = random();
    nonce_[1] = random();
    for (int r = 0; r < shape.nranks; ++r) make_rank(r);
    for (int a = 0; a < shape.nranks; ++a)
      for (int b = 0; b < a; ++b) connect(a, b);
    for (Rank& rank : ranks) rank.context.hear_pipes();
  }

  Link& link(int from, int to) { return *ranks[size_t(from)].links[size_t(to)]; }

  // Lets the ranks of `todo` step in random order until each has ended. False when all are stuck.
  bool run(std::vector<int> todo, const std::function<Step(int)>& step,
           const std::function<void(int)>& ended) {
    int stuck = 0;
    while (!todo.empty()) {
      std::shuffle(todo.begin(), todo.end(), random);
      bool moved = false;
      for (size_t i = 0; i < todo.size();) {
        Step s = step(todo[i]);
        moved = moved || s != Step::Blocked;
        if (s != Step::Done && s != Step::Failed) {
          ++i;
          continue;
        }
        ended(todo[i]);
        todo.erase(todo.begin() + ptrdiff_t(i));
      }
      stuck = moved ? 0 : stuck + 1;
      if (stuck > 50) return false;  // a trickle may take nothing for a while
    }
    return true;
  }

  bool idle() {
    bool all = true;
    for (int a = 0; a < shape_.nranks; ++a)
      for (int b = 0; b < shape_.nranks; ++b)
        for (int c = 0; c < kChannels && a != b; ++c) all = all && link(a, b).pipe[c]->idle();
    return all;
  }

 private:
  void make_rank(int r) {
    Rank& rank = ranks[size_t(r)];
    rank.segment = std::make_unique<Segment>(shape_.nranks, shape_.ring_bytes);
    ncclResult_t made = r ? rank.segment->open(Fd(dup(ranks[0].segment->fd()))) : rank.segment->create();
    CHECK_EQ(int(made), int(ncclSuccess));
    Context& c = rank.context;
    c.rank = r;
    c.nranks = shape_.nranks;
    c.inline_bytes = shape_.inline_bytes;
    c.shown_bytes = shape_.shown_bytes;
    c.block_bytes = shape_.block_bytes;
    c.cell = &rank.segment->cell(r);
    c.board = rank.segment->board(r);
    c.board_bytes = c.board.most();
    std::vector<uint64_t> hosts;
    for (int p = 0; p < shape_.nranks; ++p) hosts.push_back(uint64_t(shape_.host(p)));
    c.layout = Layout(hosts);
    for (int p = 0; p < shape_.nranks; ++p) {
      rank.links.push_back(p == r ? nullptr : std::make_unique<Link>());
      if (p != r) rank.links.back()->name = "seat " + std::to_string(p);
      c.links.push_back(rank.links.back().get());
    }
    c.fail = [&rank](ErrorCode code, const std::string& text) {
      rank.error = code.result;
      rank.text = text;
      return Step::Failed;
    };
    rank.coll = std::make_unique<Coll>(c);
    rank.p2p = std::make_unique<P2p>(c);
  }

  void connect(int a, int b) {
    bool apart = shape_.host(a) != shape_.host(b);
    Wire wire = shape_.wire == Wire::Mixed ? kWires[below(random, 3)] : shape_.wire;
    if (apart && wire <= Wire::Rings)
      wire = shape_.wire == Wire::Mixed && below(random, 2) ? Wire::Few : Wire::Sockets;
    Link &ab = link(a, b), &ba = link(b, a);
    if (wire <= Wire::Rings) {
      ranks[size_t(a)].segment->attach(a, b, &ab);
      ranks[size_t(b)].segment->attach(b, a, &ba);
    }
    for (Link* l : {&ab, &ba}) {
      if (wire == Wire::Plain) l->memory = own_memory();
      if (wire == Wire::Kernel)
        l->memory = process_memory({getpid(), reinterpret_cast<uintptr_t>(nonce_), {nonce_[0], nonce_[1]}});
    }
    for (int c = 0; c < kChannels && wire == Wire::Sockets; ++c) {
      int ends[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
      ab.pipe[c] = tcp_pipe(std::make_shared<Socket>(Fd(ends[0])));
      ba.pipe[c] = tcp_pipe(std::make_shared<Socket>(Fd(ends[1])));
    }
    for (int c = 0; c < kChannels && wire == Wire::Few; ++c) {
      auto there = std::make_shared<std::deque<char>>(), back = std::make_shared<std::deque<char>>();
      size_t room = sizeof(Passed) + shape_.inline_bytes;
      ab.pipe[c] = std::make_unique<Trickle>(there, back, room, random());
      ba.pipe[c] = std::make_unique<Trickle>(back, there, room, random());
    }
  }

  Shape shape_;
  uint64_t nonce_[2];

 public:
  Random random;
  std::vector<Rank> ranks;
};

// ---- collectives ----

constexpr Func kFuncs[] = {Func::AllReduce,     Func::Reduce,   Func::Broadcast, Func::AllGather,
                           Func::ReduceScatter, Func::AlltoAll, Func::Gather,    Func::Scatter};

struct Case {
  Func func;
  RedKind red;
  ncclDataType_t dtype;
  int root;
  size_t count;
  bool in_place;
};

// A rank's buffers, with guards around them.
struct Buffers {
  static constexpr size_t kGuard = 64;
  static constexpr char kUntouched = 0x5a, kLeft = 0x33;
  std::vector<char> memory;
  size_t send_at = kGuard, recv_at = kGuard, send_bytes = 0, recv_bytes = 0;
  std::vector<char> result;
  bool ended = false;
  char* send() { return memory.data() + send_at; }
  char* recv() { return memory.data() + recv_at; }
};

size_t send_parts(Func f, int n) {
  return f == Func::ReduceScatter || f == Func::AlltoAll || f == Func::Scatter ? size_t(n) : 1;
}
size_t recv_parts(Func f, int n) {
  return f == Func::AllGather || f == Func::AlltoAll || f == Func::Gather ? size_t(n) : 1;
}

// A whole collective: everyone's buffers, what must come out, and what came.
class Collective {
 public:
  Collective(World& world, const Case& c) : world_(world), case_(c) {
    int n = int(world.ranks.size());
    bytes_ = c.count * type_size(c.dtype);
    size_t send = send_parts(c.func, n) * bytes_, recv = recv_parts(c.func, n) * bytes_;
    for (int r = 0; r < n; ++r) {
      Buffers b;
      size_t apart = Buffers::kGuard + send + Buffers::kGuard;
      b.send_bytes = send;
      b.recv_bytes = recv;
      b.recv_at = apart;
      if (c.in_place && send >= recv) b.recv_at = b.send_at + (send == recv ? 0 : size_t(r) * bytes_);
      if (c.in_place && send < recv) {
        b.recv_at = b.send_at;
        b.send_at += size_t(r) * bytes_;
      }
      b.memory.assign(apart + recv + Buffers::kGuard, Buffers::kUntouched);
      fill(b.send(), send);
      inputs_.push_back(std::vector<char>(b.send(), b.send() + send));
      scalars_.push_back(PreMul{});
      fill(reinterpret_cast<char*>(scalars_.back().bytes), type_size(c.dtype));
      buffers_.push_back(std::move(b));
    }
  }

  Op op(int r) {
    Op op;
    op.func = case_.func;
    op.red = case_.red;
    op.dtype = case_.dtype;
    op.root = case_.root;
    op.count = case_.count;
    op.send = buffers_[size_t(r)].send();
    op.recv = buffers_[size_t(r)].recv();
    op.scalar = scalars_[size_t(r)];
    return op;
  }

  // The rank is done: what it has now is its result, and it may write where it likes.
  void ended(int r) {
    Buffers& b = buffers_[size_t(r)];
    b.result = b.memory;
    b.ended = true;
    std::fill(b.memory.begin(), b.memory.end(), Buffers::kLeft);
  }

  bool right() {
    bool all = true;
    for (int r = 0; r < int(buffers_.size()); ++r) {
      Buffers& b = buffers_[size_t(r)];
      bool left_alone = b.memory == std::vector<char>(b.memory.size(), Buffers::kLeft);
      all = all && b.ended && left_alone && b.result == wanted(r);
    }
    return all;
  }

 private:
  void fill(char* to, size_t bytes) {
    size_t item = type_size(case_.dtype);
    // Megabytes repeat a prime number of values, which no ring's size divides: random ones are slow under
    // TSan.
    size_t distinct = std::min(bytes / item, size_t(65521)) * item;
    for (size_t i = 0; i < distinct; i += item) {
      // Values of very different size: their sum depends on the order.
      double value = std::ldexp(double(below(world_.random, 1000)) - 500, int(below(world_.random, 24)) - 12);
      float single = float(value);
      if (case_.dtype == ncclFloat64)
        memcpy(to + i, &value, item);
      else if (case_.dtype == ncclBfloat16)
        memcpy(to + i, reinterpret_cast<char*>(&single) + 2, item);
      else
        memcpy(to + i, &single, item);
    }
    for (size_t i = distinct; i < bytes; i += distinct) memcpy(to + i, to, std::min(distinct, bytes - i));
  }

  const char* input(int rank, int part) const {
    return inputs_[size_t(rank)].data() + (send_parts(case_.func, 2) > 1 ? size_t(part) * bytes_ : 0);
  }

  // The memory of rank r afterwards.
  std::vector<char> wanted(int r) const {
    const Buffers& b = buffers_[size_t(r)];
    int n = int(buffers_.size());
    std::vector<char> all(b.memory.size(), Buffers::kUntouched);
    std::copy(inputs_[size_t(r)].begin(), inputs_[size_t(r)].end(), all.begin() + ptrdiff_t(b.send_at));
    char* out = all.data() + b.recv_at;
    bool root = r == case_.root;
    if (bytes_ == 0 || ((case_.func == Func::Reduce || case_.func == Func::Gather) && !root)) return all;
    std::vector<const void*> in;
    for (int p = 0; p < n; ++p) in.push_back(input(p, r));
    if (reduces(case_.func))
      reduce(out, in);
    else if (case_.func == Func::Broadcast || case_.func == Func::Scatter)
      memcpy(out, in[size_t(case_.root)], bytes_);
    else
      for (int p = 0; p < n; ++p) memcpy(out + size_t(p) * bytes_, in[size_t(p)], bytes_);
    return all;
  }

  // In rank order; or, of large data, on each host and then in the order of the hosts.
  void reduce(char* out, const std::vector<const void*>& in) const {
    const Context& context = world_.ranks[0].context;
    const Layout& layout = context.layout;
    int n = int(in.size());
    if (bytes_ <= most_with_header(context, case_.func) || layout.hosts.size() == 1 ||
        layout.hosts.size() == in.size())
      return pncpu::reduce(out, in.data(), n, case_.count, case_.dtype, case_.red, n, scalars_.data());
    bool divides = case_.red == RedKind::Avg && case_.dtype < ncclFloat16;
    bool scales = case_.red == RedKind::PreMulSum || (case_.red == RedKind::Avg && !divides);
    std::vector<std::vector<char>> sums;
    std::vector<const void*> all;
    for (const std::vector<int>& host : layout.hosts) {
      std::vector<const void*> some;
      std::vector<PreMul> scalars;
      for (int p : host) {
        some.push_back(in[size_t(p)]);
        scalars.push_back(scalars_[size_t(p)]);
      }
      sums.emplace_back(bytes_);
      pncpu::reduce(sums.back().data(), some.data(), int(some.size()), case_.count, case_.dtype,
                    divides ? RedKind::Sum : case_.red, n, scalars.data());
    }
    for (const std::vector<char>& sum : sums) all.push_back(sum.data());
    pncpu::reduce(out, all.data(), int(all.size()), case_.count, case_.dtype,
                  scales ? RedKind::Sum : case_.red, n, nullptr);
  }

  World& world_;
  Case case_;
  size_t bytes_ = 0;
  std::vector<Buffers> buffers_;
  std::vector<std::vector<char>> inputs_;
  std::vector<PreMul> scalars_;
};

Case random_case(Random& random, int nranks, const std::vector<size_t>& counts) {
  static const ncclDataType_t types[] = {ncclInt8, ncclFloat32, ncclFloat64, ncclBfloat16};
  static const RedKind kinds[] = {RedKind::Sum, RedKind::Prod, RedKind::Max, RedKind::Avg,
                                  RedKind::PreMulSum};
  Case c;
  c.func = kFuncs[below(random, 8)];
  c.red = kinds[below(random, 5)];
  c.dtype = types[below(random, 4)];
  c.root = int(below(random, size_t(nranks)));
  c.count = counts[below(random, counts.size())];
  c.in_place = c.func != Func::AlltoAll && below(random, 2);
  return c;
}

// Every rank runs the cases one after the other; no rank waits for the others in between.
bool run_program(World& world, const std::vector<Case>& cases) {
  std::vector<std::unique_ptr<Collective>> all;
  for (const Case& c : cases) all.push_back(std::make_unique<Collective>(world, c));
  std::vector<size_t> at(world.ranks.size(), 0);
  std::vector<int> todo;
  for (int r = 0; r < int(world.ranks.size()); ++r) {
    world.ranks[size_t(r)].coll->start(all[0]->op(r), ++world.ranks[size_t(r)].seq);
    todo.push_back(r);
  }
  auto step = [&](int r) {
    Rank& rank = world.ranks[size_t(r)];
    Step s = rank.coll->step();
    if (s != Step::Done) return s;
    all[at[size_t(r)]]->ended(r);
    if (++at[size_t(r)] == all.size()) return Step::Done;
    rank.coll->start(all[at[size_t(r)]]->op(r), ++rank.seq);
    return Step::Moved;
  };
  if (!world.run(todo, step, [](int) {})) return false;
  bool right = true;
  for (size_t i = 0; i < all.size(); ++i)
    if (!all[i]->right()) {
      fprintf(stderr, "wrong: case %zu, %s\n", i, header_of(all[i]->op(0), 0).str().c_str());
      right = false;
    }
  return right && world.idle();
}

TEST_CASE("every collective over every wire") {
  for (Wire wire : kWires)
    for (int n : {1, 2, 3, 5, scaled(8, 8, 4)})
      for (Func func : kFuncs)
        for (size_t count : {0, 1, 17, 65, 1500, 9001}) {
          std::vector<Case> cases;
          for (bool in_place : {false, true})
            if (!in_place || func != Func::AlltoAll)
              cases.push_back({func, RedKind::Sum, ncclFloat32, n - 1, count, in_place});
          for (size_t shown : {0, 1 << 20}) {
            World world({n, wire, 256, 4096, 8192, count + 1, 1, shown});
            bool right = run_program(world, cases);
            CHECK_MESSAGE(right, formatted("wire %d, %d ranks, %s, count %zu, shown %zu", int(wire), n,
                                           func_name(func), count, shown));
            if (!right) return;
          }
        }
}

TEST_CASE("random programs") {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Random random(seed);
    Shape shape{int(1 + below(random, 6)), Wire(below(random, 6)), 64, 4096, 4096, seed};
    shape.shown_bytes = seed % 2 * 8192;
    World world(shape);
    std::vector<Case> cases;
    for (int i = 0; i < 25; ++i)
      cases.push_back(random_case(random, shape.nranks, {0, 1, 7, 16, 63, 500, 3000}));
    CHECK_MESSAGE(run_program(world, cases), "seed ", seed);
  }
}

// As much as can come with a header, and more. The ranks take turns in one thread, so TSan has little to
// find, and it takes a minute for the megabytes of all wires.
TEST_CASE("inline messages of the largest size") {
  size_t most = Segment(4, 4096).shown_bytes();
  std::vector<Wire> wires{Wire::Plain, Wire::Rings, Wire::Sockets};
  wires.resize(size_t(scaled(3, 3, 1)));
  for (Wire wire : wires)
    for (size_t bytes : {most / 4, most, most + 4}) {
      World world({4, wire, size_t(3) << 20, 4096, size_t(4) << 20, 5});
      std::vector<Case> cases;
      for (Func func : kFuncs) cases.push_back({func, RedKind::Sum, ncclFloat32, 1, bytes / 4, false});
      CHECK(run_program(world, cases));
    }
}

// A rank sleeps until all peers have told it their stage.
TEST_CASE("the last of the peers wakes a rank") {
  for (size_t shown : {0, 1 << 20}) {
    World world({4, Wire::Plain, 256, 4096, 8192, 1, 1, shown});
    std::vector<std::vector<float>> x(4, std::vector<float>(8192, 1));
    Op op;
    op.dtype = ncclFloat32;
    op.count = 8192;
    for (size_t r = 0; r < 4; ++r) {
      op.send = op.recv = x[r].data();
      world.ranks[r].coll->start(op, 1);
    }
    auto steps = [&](size_t r) {
      Step s = Step::Moved;
      while (s == Step::Moved) s = world.ranks[r].coll->step();
      return s;
    };
    // All call; 3 and then 0 do their part.
    for (size_t r : {0, 1, 2, 3, 0}) CHECK(steps(r) == Step::Blocked);
    const Doorbell& bell = world.ranks[0].context.cell->bell;
    uint32_t before = bell.look();
    CHECK(steps(1) == Step::Blocked);
    CHECK_EQ(bell.look(), before);
    CHECK(steps(2) == Step::Done);
    CHECK_EQ(bell.look(), before + 1);
    for (size_t r : {0, 1, 3}) CHECK(steps(r) == Step::Done);
    for (const std::vector<float>& all : x) CHECK(all == std::vector<float>(8192, 4));
  }
}

// ---- schedules ----

// Whether of any two actions on one pipe in one direction the later is after the earlier, and what an action
// refers to exists.
bool sound(const Schedule& s) {
  auto is_after = [&](size_t later, size_t earlier) {
    for (int32_t i = s.actions[later].after; i != Action::kNone; i = s.actions[size_t(i)].after)
      if (size_t(i) == earlier) return true;
    return false;
  };
  auto reads = [&](const Action& a, int p) {
    bool hit = a.kind == Action::Copy && a.from.kind == Place::Pipe && a.from.rank == p;
    for (size_t i = a.first_input; i < a.first_input + a.inputs; ++i)
      hit = hit || (s.inputs[i].kind == Place::Pipe && s.inputs[i].rank == p);
    return hit;
  };
  auto writes = [](const Action& a, int p) {
    return a.kind == Action::Copy && a.to.kind == Place::Pipe && a.to.rank == p;
  };
  for (size_t i = 0; i < s.actions.size(); ++i) {
    const Action& a = s.actions[i];
    if (a.after >= int32_t(i) || a.follows >= int32_t(i)) return false;
    if (a.follows != Action::kNone && s.actions[size_t(a.follows)].bytes != a.bytes) return false;
    if (a.first_input + a.inputs > s.inputs.size()) return false;
    if ((a.kind == Action::Copy || a.kind == Action::Reduce) && a.bytes == 0) return false;
    for (size_t k = 0; k < i; ++k)
      for (int p = 0; p < 16; ++p) {
        if (reads(a, p) && reads(s.actions[k], p) && !is_after(i, k)) return false;
        if (writes(a, p) && writes(s.actions[k], p) && !is_after(i, k)) return false;
      }
  }
  return true;
}

TEST_CASE("schedules are sound") {
  Random random(3);
  for (int i = 0; i < 20000; ++i) {
    Call c{};
    c.nranks = 1 + int(below(random, 9));
    c.rank = int(below(random, size_t(c.nranks)));
    c.root = int(below(random, size_t(c.nranks)));
    c.func = kFuncs[below(random, 8)];
    c.item = size_t(1) << below(random, 4);
    c.count = below(random, 4) ? below(random, 100000) : below(random, 20);
    c.few = c.count * c.item <= 64;
    c.payloads = c.few || below(random, 2);
    std::vector<uint64_t> hosts;
    for (int p = 0, most = 1 + int(below(random, 9)); p < c.nranks; ++p)
      hosts.push_back(below(random, size_t(most)));
    Layout layout(hosts);
    layout.by_hosts = below(random, 4);
    c.layout = &layout;
    for (int p = 0; p < c.nranks; ++p)
      c.direct.push_back(p != c.rank && layout.same_host(p, c.rank) && below(random, 2));
    Schedule s;
    algorithm_for(c).plan(c, &s);
    CHECK(sound(s));
    if (!sound(s)) break;
  }
}

// ---- matching ----

Step start_and_run(World& world, const std::vector<Op>& ops) {
  std::vector<int> todo;
  for (size_t r = 0; r < ops.size(); ++r) {
    world.ranks[r].coll->start(ops[r], ++world.ranks[r].seq);
    todo.push_back(int(r));
  }
  bool ended = world.run(todo, [&](int r) { return world.ranks[size_t(r)].coll->step(); }, [](int) {});
  return ended ? Step::Done : Step::Blocked;
}

TEST_CASE("a mismatch names who called what") {
  for (Wire wire : kWires) {
    World world({3, wire});
    float in[300] = {}, out[900];
    std::vector<Op> ops(3);
    for (Op& op : ops) {
      op.dtype = ncclFloat32;
      op.count = 300;
      op.send = in;
      op.recv = out;
    }
    ops[1].func = Func::AllGather;
    start_and_run(world, ops);
    int failed = 0;
    for (Rank& rank : world.ranks) {
      if (rank.error == ncclSuccess) continue;  // its peers failed before they could tell it
      ++failed;
      CHECK_EQ(int(rank.error), int(ncclInvalidUsage));
      CHECK(contains(rank.text, "collective #1 differs between ranks:"));
      CHECK(contains(rank.text, "rank 1 called AllGather(count 300, float32)"));
      CHECK(contains(rank.text, "called AllReduce(count 300, float32, sum)"));
    }
    CHECK((wire >= Wire::Few ? failed > 0 : failed == 3));
  }
}

// The headers of the odd call go another way than those of the others.
TEST_CASE("a mismatch on many hosts") {
  for (int odd = 0; odd < 12; ++odd) {
    World world({12, odd % 2 ? Wire::Sockets : Wire::Few});
    std::vector<float> in(12 * 30), out(12 * 30);
    std::vector<Op> ops(12);
    for (Op& op : ops) {
      op.dtype = ncclFloat32;
      op.count = 30;
      op.send = in.data();
      op.recv = out.data();
    }
    ops[size_t(odd)].func = Func::ReduceScatter;
    start_and_run(world, ops);
    int failed = 0;
    for (Rank& rank : world.ranks) {
      failed += rank.error != ncclSuccess;
      CHECK((rank.error == ncclSuccess || rank.error == ncclInvalidUsage));
      CHECK((rank.error == ncclSuccess ||
             contains(rank.text,
                      "rank " + std::to_string(odd) + " called ReduceScatter(count 30, float32, sum)")));
    }
    CHECK(failed > 0);
  }
}

TEST_CASE("missing ranks are told") {
  World world({3, Wire::Rings});
  float x[4] = {};
  Op op;
  op.dtype = ncclFloat32;
  op.count = 4;
  op.send = op.recv = x;
  for (int r : {0, 2}) world.ranks[size_t(r)].coll->start(op, 1);
  for (int i = 0; i < 3; ++i)
    for (int r : {0, 2}) CHECK(world.ranks[size_t(r)].coll->step() == Step::Blocked);
  CHECK(world.ranks[0].coll->missing() == std::vector<int>{1});
  CHECK(!world.ranks[0].coll->underway());
}

// Headers that an absent rank would pass on do not come either, but only the absent are told.
TEST_CASE("missing ranks on several hosts are told") {
  for (uint64_t seed = 1; seed <= uint64_t(scaled(200, 100, 50)); ++seed) {
    Random random(seed);
    int n = 3 + int(below(random, 22)), hosts = 2 + int(below(random, size_t(n - 1)));
    World world({n, below(random, 2) ? Wire::Rings : Wire::Mixed, 64, 4096, 4096, seed, hosts});
    Collective collective(world, {Func::AllReduce, RedKind::Sum, ncclFloat32, 0, 4, false});
    std::vector<int> absent, present;
    for (int r = 0; r < n; ++r) (below(random, 4) ? present : absent).push_back(r);
    if (absent.empty() || present.empty()) continue;
    for (int r : present) world.ranks[size_t(r)].coll->start(collective.op(r), 1);
    for (int i = 0; i < 100; ++i)
      for (int r : present) CHECK(world.ranks[size_t(r)].coll->step() == Step::Blocked);
    for (int r : present) {
      std::vector<int> missing = world.ranks[size_t(r)].coll->missing();
      CHECK(!missing.empty());
      CHECK(std::includes(absent.begin(), absent.end(), missing.begin(), missing.end()));
    }
  }
}

TEST_CASE("a rank passes headers to few others") {
  for (auto [hosts, few] : {std::pair{2, 1}, {8, 7}, {9, 8}, {16, 8}, {64, 14}, {200, 17}}) {
    std::vector<uint64_t> ids;
    for (int r = 0; r < 3 * hosts; ++r) ids.push_back(uint64_t(r % hosts));
    Layout layout(ids);
    for (int r = 0; r < 3 * hosts; ++r) CHECK_EQ(Routes(layout, r).ways().size(), size_t(few + 2));
  }
}

// A header that names the same call with anything else changed is no mismatch of the program's.
TEST_CASE("a corrupt header is refused") {
  for (int what = 0; what < 6; ++what)
    for (size_t count : {4, 4000}) {
      Wire wire = what < 3 ? Wire::Rings : Wire::Sockets;
      World world({2, wire});
      std::vector<float> in(count), out(count);
      Op op;
      op.dtype = ncclFloat32;
      op.count = count;
      op.send = in.data();
      op.recv = out.data();
      Header h = header_of(op, 1);
      h.is_inline = op.bytes() <= 256;
      h.payload = h.is_inline ? uint32_t(op.bytes()) : 0;
      if (what % 3 == 0) h.payload = 0x7fffffff;
      if (what % 3 == 1) h.seq = 7;
      if (what % 3 == 2) h.is_inline = !h.is_inline;
      if (wire == Wire::Rings) {
        Notice& notice = world.ranks[1].context.board.notice(1);
        memcpy(notice.head, &h, sizeof h);
        notice.number.store(1);
      } else {
        Passed passed{1, h};
        CHECK(world.link(1, 0).pipe[kColl]->put(&passed, sizeof passed, nullptr, 0));
      }
      Rank& rank = world.ranks[0];
      rank.coll->start(op, 1);
      CHECK(rank.coll->step() == Step::Failed);
      CHECK_EQ(int(rank.error), int(ncclInternalError));
      CHECK(contains(rank.text, "rank 1 (seat 1) announced AllReduce"));

      op.func = Func::Recv;
      op.root = 1;
      h.func = uint8_t(Func::Send);
      CHECK(world.link(1, 0).pipe[kP2p]->put(&h, sizeof h, nullptr, 0));
      std::vector<Op> ops{op};
      rank.p2p->start(ops);
      CHECK(rank.p2p->step() == Step::Failed);
      CHECK(contains(rank.text, "rank 1 (seat 1) announced Send"));
    }
}

// The others would only look again when their sleep ends.
TEST_CASE("the last rank that shows its call wakes the others") {
  World world({4, Wire::Rings});
  Collective collective(world, {Func::AllReduce, RedKind::Sum, ncclFloat32, 0, 4, false});
  auto rings = [&](int r) { return world.ranks[0].segment->cell(r).bell.look(); };
  for (int r = 0; r < 4; ++r) world.ranks[size_t(r)].coll->start(collective.op(r), 1);
  for (int r : {2, 0, 3, 2, 0}) CHECK(world.ranks[size_t(r)].coll->step() == Step::Blocked);
  for (int r = 0; r < 4; ++r) CHECK_EQ(rings(r), 0u);
  CHECK(world.ranks[1].coll->step() == Step::Done);
  for (int r : {0, 2, 3}) {
    CHECK_EQ(rings(r), 1u);
    CHECK(world.ranks[size_t(r)].coll->step() == Step::Done);
  }
}

// Four times: the ranks' notices and data of one number are written again for the number after the next.
TEST_CASE("ranks on two hosts") {
  for (Wire wire : {Wire::Rings, Wire::Plain, Wire::Kernel})
    for (size_t count : {size_t(1), size_t(14), size_t(15), size_t(2000), size_t(20000)}) {
      World world({5, wire, 8192, 4096, size_t(1) << 16, count, 2});
      std::vector<Case> cases;
      for (int times = 0; times < 4; ++times)
        for (Func func : kFuncs)
          cases.push_back(
              {func, RedKind::Sum, ncclFloat32, times, count, func != Func::AlltoAll && times % 2});
      CHECK_MESSAGE(run_program(world, cases), "count ", count);
    }
}

TEST_CASE("random programs on several hosts") {
  for (uint64_t seed = 1; seed <= uint64_t(scaled(80, 40, 20)); ++seed) {
    Random random(seed);
    // A pair of neighbours may use each other's buffers while another does not.
    Wire wire = std::array{Wire::Rings, Wire::Plain, Wire::Kernel, Wire::Mixed}[below(random, 4)];
    bool many = below(random, 4) == 0;
    int n = int(2 + below(random, many ? 20 : 8));
    Shape shape{n, wire, 64, 4096, 4096, seed, many ? n : int(2 + below(random, 7))};
    World world(shape);
    std::vector<Case> cases;
    for (int i = 0; i < (many ? 5 : 20); ++i)
      cases.push_back(random_case(random, shape.nranks, {1, 16, 63, 500, 500, 3000, 3000, 20000}));
    CHECK_MESSAGE(run_program(world, cases), "seed ", seed);
  }
}

TEST_CASE("a notice of a later collective is refused") {
  World world({2, Wire::Rings});
  Collective collective(world, {Func::AllReduce, RedKind::Sum, ncclFloat32, 0, 4, false});
  world.ranks[1].context.board.notice(1).number.store(3);
  world.ranks[0].coll->start(collective.op(0), 1);
  CHECK(world.ranks[0].coll->step() == Step::Failed);
  CHECK_EQ(int(world.ranks[0].error), int(ncclInternalError));
  CHECK_EQ(world.ranks[0].text, "rank 1 (seat 1) shows collective #3, expected #1: what it sends is corrupt");
}

// What a peer writes over its notices and the indices of the rings ends in an error that names it, wherever
// it happens, and never outside of them.
TEST_CASE("corrupt shared memory is refused") {
  int failed = 0;
  for (uint64_t seed = 1; seed <= 800; ++seed) {
    Random random(seed);
    World world({2, Wire::Rings, 256, 4096, 4096, seed});
    Case c = random_case(random, 2, {0, 16, 500, 5000});
    Collective collective(world, c);
    for (int r = 0; r < 2; ++r) world.ranks[size_t(r)].coll->start(collective.op(r), 1);
    char* states = reinterpret_cast<char*>(&world.ranks[0].segment->cell(0)) + 4096;
    size_t steps = below(random, 6), at = below(random, sizeof(RingState) * 4 * kChannels / 64) * 64;
    if (below(random, 2)) {
      states = reinterpret_cast<char*>(&world.ranks[0].segment->board(int(below(random, 2))).notice(1));
      at = below(random, sizeof(Notice) / 8) * 8;
    }
    Step last[2] = {Step::Moved, Step::Moved};
    for (size_t i = 0; i < 60; ++i)
      for (int r = 0; r < 2; ++r) {
        if (i == steps) {
          uint64_t value = below(random, 2) ? random() : below(random, 20000);
          memcpy(states + at, &value, sizeof value);
        }
        if (last[r] != Step::Done && last[r] != Step::Failed) last[r] = world.ranks[size_t(r)].coll->step();
      }
    for (int r = 0; r < 2; ++r) {
      if (last[r] != Step::Failed) continue;
      ++failed;
      CHECK(contains(world.ranks[size_t(r)].text, "rank " + std::to_string(1 - r)));
    }
  }
  CHECK(failed > 20);
}

TEST_CASE("a ring that is too full names its owner") {
  World world({2, Wire::Rings});
  RingState* states =
      reinterpret_cast<RingState*>(reinterpret_cast<char*>(&world.ranks[0].segment->cell(0)) + 4096);
  Collective collective(world, {Func::AllReduce, RedKind::Sum, ncclFloat32, 0, 1000, false});
  for (int r : {1, 0}) world.ranks[size_t(r)].coll->start(collective.op(r), 1);
  world.ranks[1].coll->step();
  states[2 * kChannels + kColl].head.store(8193);  // from rank 1 to rank 0
  Step last = Step::Moved;
  for (int i = 0; i < 9 && last != Step::Failed; ++i) last = world.ranks[0].coll->step();
  CHECK(last == Step::Failed);
  CHECK_EQ(int(world.ranks[0].error), int(ncclInternalError));
  CHECK_EQ(
      world.ranks[0].text,
      "rank 1 (seat 1) corrupted the memory that it shares with rank 0: a ring holds more than fits into it");
}

// ---- messages ----

TEST_CASE("messages between all pairs") {
  for (Wire wire : kWires)
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      Random random(seed);
      int n = 1 + int(below(random, 5));
      World world({n, wire, 64, 4096, 4096, seed});
      std::vector<std::vector<Op>> ops(static_cast<size_t>(n));
      std::deque<std::vector<char>> sent, got;
      for (int from = 0; from < n; ++from)
        for (int to = 0; to < n; ++to)
          for (size_t i = below(random, 4); i > 0; --i) {
            size_t bytes = below(random, 2) ? below(random, 100) : below(random, 30000);
            sent.emplace_back(bytes + 1);
            got.emplace_back(bytes + 1);
            for (size_t k = 0; k < bytes; ++k) sent.back()[k] = char(random());
            Op op;
            op.count = bytes;
            op.func = Func::Send;
            op.send = sent.back().data();
            op.root = to;
            ops[size_t(from)].push_back(op);
            op.func = Func::Recv;
            op.recv = got.back().data();
            op.root = from;
            ops[size_t(to)].push_back(op);
          }
      for (int batch = 0; batch < 2; ++batch) {
        std::vector<int> todo;
        for (int r = 0; r < n; ++r) {
          world.ranks[size_t(r)].p2p->start(ops[size_t(r)]);
          todo.push_back(r);
        }
        CHECK(world.run(todo, [&](int r) { return world.ranks[size_t(r)].p2p->step(); }, [](int) {}));
        CHECK(sent == got);
        for (auto& g : got) std::fill(g.begin(), g.end(), 0);
      }
      CHECK(world.idle());
    }
}

TEST_CASE("messages that differ are named") {
  World world({2, Wire::Sockets});
  float x[8] = {};
  std::vector<Op> ops(2);
  for (Op& op : ops) {
    op.dtype = ncclFloat32;
    op.send = op.recv = x;
  }
  ops[0].func = Func::Send;
  ops[0].root = 1;
  ops[0].count = 8;
  ops[1].func = Func::Recv;
  ops[1].count = 7;
  std::vector<Op> send{ops[0]}, recv{ops[1]};
  world.ranks[0].p2p->start(send);
  world.ranks[1].p2p->start(recv);
  world.ranks[0].p2p->step();
  CHECK(world.ranks[1].p2p->step() == Step::Failed);
  CHECK(contains(world.ranks[1].text,
                 "rank 0 sent rank 1 Send(count 8, float32), which waited in Recv(count 7, float32)"));
}

// ---- what may go wrong in between ----

// Memory runs out at each allocation in turn: the exception leaves the step, and all that is left can be
// destroyed.
TEST_CASE("memory that runs out") {
  for (Wire wire : {Wire::Plain, Wire::Kernel, Wire::Rings, Wire::Sockets}) {
    bool ran_out = true;
    for (int64_t k = 0; ran_out && k < 2000; ++k) {
      World world({3, wire, 256, 4096, 8192, 9});
      Collective large(world, {Func::AllReduce, RedKind::Sum, ncclFloat32, 0, 5000, false});
      Collective small(world, {Func::AllGather, RedKind::Sum, ncclFloat32, 0, 10, false});
      ran_out = false;
      failing_allocation = k;
      try {
        for (int r = 0; r < 3; ++r) world.ranks[size_t(r)].coll->start(large.op(r), 1);
        for (int i = 0; i < 200; ++i)
          for (int r = 0; r < 3; ++r) {
            Rank& rank = world.ranks[size_t(r)];
            if (rank.seq < 2 && rank.coll->step() == Step::Done && ++rank.seq < 2)
              rank.coll->start(small.op(r), 2);
          }
      } catch (const std::bad_alloc&) {
        ran_out = true;
      }
      failing_allocation = -1;
      for (Rank& rank : world.ranks) {
        CHECK_EQ(int(rank.error), int(ncclSuccess));
        CHECK((ran_out || rank.seq == 2));
        CHECK(!contains(rank.coll->str(), "?"));
      }
    }
    CHECK(!ran_out);
  }
}

// Any thread asks whether the peers are at work while another makes the steps.
TEST_CASE("underway is for every thread") {
  World world({2, Wire::Plain});
  std::atomic<bool> stop{false};
  uint64_t seen = 0;
  std::thread waiter([&] {
    while (!stop.load()) seen += world.ranks[0].coll->underway();
  });
  for (int i = 0; i < 50; ++i)
    CHECK(run_program(world, {{Func::AllReduce, RedKind::Sum, ncclFloat32, 0, 30000, false}}));
  stop.store(true);
  waiter.join();
  CHECK(!world.ranks[0].coll->underway());
}

}  // namespace
