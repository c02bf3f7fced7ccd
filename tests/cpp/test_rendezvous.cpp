// Unique ids, and how ranks meet at them: at one root, at several, late, never, or until an abort.
#include <signal.h>

#include <cstddef>
#include <iterator>

#include "job.hpp"
#include "service/ids.hpp"

using namespace testing;
using namespace pncpu;

namespace {

// ---- unique ids ----

TEST_CASE("ids cost nothing") {
  auto creation = [] {
    double began = now();
    for (int i = 0; i < 20; ++i) {
      ncclUniqueId id;
      ncclComm_t comm;
      OK(ncclGetUniqueId(&id));
      OK(ncclCommInitRank(&comm, 1, id, 0));
      OK(ncclCommDestroy(comm));
    }
    return (now() - began) / 20;
  };
  creation();
  double before = creation();
  Gauge gauge;
  ncclUniqueId first, id;
  OK(ncclGetUniqueId(&first));
  for (int i = 0; i < scaled(200000, 200000, 20000); ++i) OK(ncclGetUniqueId(&id));
  CHECK(!gauge.grew_beyond(4096));
  double after = creation();
  CHECK(after < 10 * before + 1e-3);
  Gauge idle;
  pause_for(1);
  CHECK(idle.share() < 0.05);
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, 1, first, 0));  // the oldest is as good as the newest
  OK(ncclCommDestroy(comm));
}

TEST_CASE("done ids cost nothing") {
  std::vector<ncclUniqueId> used;
  auto use = [&](int n) {
    for (int i = 0; i < n; ++i) {
      ncclUniqueId id;
      ncclComm_t comm;
      OK(ncclGetUniqueId(&id));
      OK(ncclCommInitRank(&comm, 1, id, 0));
      OK(ncclCommDestroy(comm));
      used.push_back(id);
    }
  };
  use(3000);
  Gauge gauge;
  use(3000);
  CHECK(!gauge.grew_beyond(3000));
  ncclComm_t comm;
  CHECK_EQ(int(ncclCommInitRank(&comm, 1, used.back(), 0)), int(ncclInvalidUsage));
  CHECK(contains(ncclGetLastError(nullptr),
                 "this unique id has been used already, for a communicator of 1 ranks"));
  CHECK_EQ(int(ncclCommInitRank(&comm, 1, used.front(), 0)), int(ncclInvalidUsage));
  CHECK(contains(ncclGetLastError(nullptr), "used long ago"));
}

TEST_CASE("an id book of gaps is bounded") {
  IdBook book;
  Id id, first;
  book.make(&first);
  for (int i = 0; i < 100000; ++i) {
    book.make(&id);
    if (i % 2) book.done(id.serial, {ncclInvalidUsage, "done", {}});
  }
  Failure end;
  CHECK(book.is_done(id.serial, &end));
  CHECK(!book.is_done(id.serial - 1, &end));
  CHECK(book.mine(id.token, id.serial));
  CHECK(!book.mine(id.token, id.serial - 1));
  CHECK(!book.mine(id.token, id.serial + 1));
  CHECK(!IdBook().mine(id.token, id.serial));
}

// ---- who is missing ----

// An id that was cut or typed wrongly makes no communicator, and costs none that is made later.
TEST_CASE("an id with a changed byte") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "0.05");
  const size_t from = offsetof(Id, token), to = offsetof(Id, host);  // the token and the serial
  for (size_t at = from; at < to; ++at) {
    ncclUniqueId id = new_id();
    id.internal[at] ^= 1;
    ncclComm_t comm = nullptr;
    CHECK(ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess);
    SAYS(testing::last_error(), "unique id");
    OK(ncclCommDestroy(alone()));
  }
}

// The ranks that the last error of this thread is about.
std::vector<int> late_ranks() {
  std::vector<int> late;
  for (int rank; OK(pyncclCpuGetLateRank(int(late.size()), &rank)), rank >= 0;) late.push_back(rank);
  return late;
}

TEST_CASE("missing ranks are listed in few words") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "0.5");
  ncclUniqueId id = settled_id();
  ncclComm_t comm = nullptr;
  CHECK_EQ(int(ncclCommInitRank(&comm, 50000, id, 3)), int(ncclTimeout));
  std::string text = ncclGetLastError(nullptr);
  CHECK(contains(text, "1 of 50000 ranks joined, missing ranks 0, 1, 2, 4, "));
  CHECK(contains(text, " and 49983 more"));
  CHECK(text.size() < 300);
  // No list has all of them.
  CHECK((late_ranks() == std::vector<int>{0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}));
  int rank = -1;
  CHECK_EQ(int(ncclCommUserRank(nullptr, &rank)), int(ncclInvalidArgument));
  CHECK(late_ranks().empty());
}

// ---- several roots ----

// Ranks in processes, each with an id of its own; all ids are known to all.
void spread(int nranks, int nids, int absent,
            const std::function<void(int, ncclResult_t, ncclComm_t)>& check) {
  std::vector<int> to_all;
  int from_all[2];
  CHECK_EQ(pipe(from_all), 0);
  std::vector<std::unique_ptr<Child>> ranks;
  for (int r = 0; r < nranks; ++r) {
    int mine[2];
    CHECK_EQ(pipe(mine), 0);
    to_all.push_back(mine[1]);
    ranks.push_back(std::make_unique<Child>([&, r] {
      struct {
        int rank;
        ncclUniqueId id;
      } own;
      own.rank = r;
      OK(ncclGetUniqueId(&own.id));
      CHECK_EQ(write(from_all[1], &own, sizeof own), ssize_t(sizeof own));
      std::vector<ncclUniqueId> ids(static_cast<size_t>(nranks));
      CHECK(read(mine[0], ids.data(), ids.size() * sizeof ids[0]) > 0);
      if (r == absent) return pause_for(5);
      ncclComm_t comm = nullptr;
      ncclResult_t result = ncclCommInitRankScalable(&comm, nranks, r, nids, ids.data(), nullptr);
      check(r, result, comm);
    }));
  }
  std::vector<ncclUniqueId> ids(static_cast<size_t>(nranks));
  for (int r = 0; r < nranks; ++r) {
    struct {
      int rank;
      ncclUniqueId id;
    } one;
    CHECK_EQ(read(from_all[0], &one, sizeof one), ssize_t(sizeof one));
    ids[size_t(one.rank)] = one.id;
  }
  for (int fd : to_all) CHECK(write(fd, ids.data(), ids.size() * sizeof ids[0]) > 0);
  for (auto& rank : ranks) CHECK_EQ(rank->wait(), 0);
}

TEST_CASE("several roots") {
  for (int nids : {1, 2, 3, 5, 7})
    spread(7, nids, -1, [](int rank, ncclResult_t result, ncclComm_t comm) {
      if (result != ncclSuccess) fprintf(stderr, "rank %d: %s\n", rank, ncclGetLastError(nullptr));
      OK(result);
      if (comm) run_rank(comm, 7);
    });
}

TEST_CASE("several roots name who is missing") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "1");
  for (int absent : {0, 4, 6})
    spread(7, 3, absent, [&](int rank, ncclResult_t result, ncclComm_t) {
      CHECK_EQ(int(result), int(ncclTimeout));
      std::string text = ncclGetLastError(nullptr);
      // The shares are ranks 0 to 2, 3 to 4 and 5 to 6.
      bool named = contains(text, "missing rank " + std::to_string(absent));
      CHECK_MESSAGE(named, "rank ", rank, " without ", absent, ": ", text);
      CHECK((late_ranks() == std::vector<int>{absent}));
    });
}

// No rank of a share comes at all.
TEST_CASE("several roots name a share that is missing") {
  set("PYNCCL_CPU_INIT_TIMEOUT", "1");
  spread(3, 3, 1, [&](int rank, ncclResult_t result, ncclComm_t) {
    CHECK_EQ(int(result), int(ncclTimeout));
    std::string text = ncclGetLastError(nullptr);
    bool named = contains(text, "ranks 1 to 1 at id 1");
    CHECK_MESSAGE(named, "rank ", rank, ": ", text);
  });
}

// ---- waits end ----

constexpr int kAborts = 30;

// From at once to well after the rank has met the root.
void pause_before_abort(int round) {
  constexpr double kPauses[] = {0, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.05};
  pause_for(kPauses[size_t(round) % std::size(kPauses)]);
}

void abort_in_time(ncclComm_t comm) {
  Stopwatch watch;
  RESULT(ncclCommAbort(comm), ncclSuccess);
  CHECK(watch.seconds() < 5);
}

// NCCL 2.14's configuration: that field and no other.
ncclConfig_t non_blocking() {
  ncclConfig_t config;
  memset(static_cast<void*>(&config), 0, sizeof config);
  config.size = offsetof(ncclConfig_t, blocking) + sizeof config.blocking;
  config.magic = NCCL_API_MAGIC;
  config.version = 21400;
  config.blocking = 0;
  return config;
}

void abort_while_created(const ncclUniqueId& id, int rank, int round) {
  ncclConfig_t config = non_blocking();
  ncclComm_t comm = nullptr;
  RESULT(ncclCommInitRankConfig(&comm, 3, id, rank, &config), ncclInProgress);
  pause_before_abort(round);
  abort_in_time(comm);
}

// The handle is there before the call blocks.
void abort_a_blocking_creation(const ncclUniqueId& id, int rank, int round) {
  ncclComm_t comm = nullptr;
  std::thread creator([&] { CHECK(ncclCommInitRank(&comm, 3, id, rank) != ncclSuccess); });
  auto published = [&] { return __atomic_load_n(&comm, __ATOMIC_ACQUIRE); };
  ncclComm_t handle = nullptr;
  CHECK(soon(20, [&] { return (handle = published()) != nullptr; }));
  pause_before_abort(round);
  abort_in_time(handle);
  creator.join();
  CHECK(published() == nullptr);
}

// As a rank of another process than the root's, and as one of the root's own.
void abort_repeatedly(void (*create_and_abort)(const ncclUniqueId& id, int rank, int round)) {
  std::vector<ncclUniqueId> ids(kAborts);
  for (ncclUniqueId& id : ids) OK(ncclGetUniqueId(&id));
  let_service_rest();
  Child remote([&] {
    for (int i = 0; i < kAborts; ++i) create_and_abort(ids[size_t(i)], 1, i);
  });
  CHECK_EQ(remote.wait(), 0);
  for (int i = 0; i < kAborts; ++i) create_and_abort(new_id(), 0, i);
}

TEST_CASE("an abort ends a rendezvous") { abort_repeatedly(abort_while_created); }

TEST_CASE("an abort ends a blocking rendezvous") { abort_repeatedly(abort_a_blocking_creation); }

// A root that is stopped, or whose host is silent, holds nobody beyond an abort.
TEST_CASE("an abort ends a wait for a stopped root") {
  int ids[2];
  CHECK_EQ(pipe(ids), 0);
  Child root([&] {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    CHECK_EQ(write(ids[1], &id, sizeof id), ssize_t(sizeof id));
    for (;;) pause();
  });
  ncclUniqueId id;
  CHECK_EQ(read(ids[0], &id, sizeof id), ssize_t(sizeof id));
  kill(root.pid(), SIGSTOP);
  for (const char* secret : {"", "with a secret of a job"}) {
    set("PYNCCL_SECRET", secret);
    for (int i = 0; i < kAborts; ++i) {
      at_step("secret '%s', round %d", secret, i);
      abort_while_created(id, 1, i);
      abort_a_blocking_creation(id, 2, i);
    }
  }
}

TEST_CASE("an abort comes before the group ends") {
  ncclComm_t comms[3] = {};
  OK(ncclGroupStart());
  OK(ncclCommInitAll(comms, 2, nullptr));
  OK(ncclCommInitRank(&comms[2], 1, new_id(), 0));
  std::thread([&] {
    abort_in_time(comms[1]);
    abort_in_time(comms[2]);
  }).join();
  RESULT(ncclGroupEnd(), ncclInvalidUsage);
  for (ncclComm_t comm : comms) CHECK(comm == nullptr);
}

// Its group failed, and whatever the caller does with the handles is answered, and ends.
TEST_CASE("a creation that never ran is over") {
  ncclComm_t comms[3] = {};
  OK(ncclGroupStart());
  OK(ncclCommInitAll(comms, 2, nullptr));
  OK(ncclCommInitRank(&comms[2], 2, new_id(), 1));
  RESULT(ncclCommInitRank(nullptr, 1, new_id(), 0), ncclInvalidArgument);
  RESULT(ncclGroupEnd(), ncclInvalidArgument);
  for (ncclComm_t comm : comms) {
    ncclResult_t state = ncclInProgress;
    OK(ncclCommGetAsyncError(comm, &state));
    RESULT(state, ncclInvalidUsage);
    ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT);
    ncclComm_t child = nullptr;
    CHECK(ncclCommSplit(comm, 0, 0, &child, nullptr) != ncclSuccess);
    CHECK(child == nullptr);
    abort_in_time(comm);
  }
}

// A handle of a group that is still open may be revoked, but nothing derived from it.
TEST_CASE("a creation that has not begun is no parent") {
  ncclComm_t comm = nullptr, child = nullptr;
  OK(ncclGroupStart());
  OK(ncclCommInitRank(&comm, 2, new_id(), 0));
  OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
  RESULT(ncclCommSplit(comm, 0, 0, &child, nullptr), ncclInvalidArgument);
  CHECK(ncclGroupEnd() != ncclSuccess);
  abort_in_time(comm);
}

const AtOnce kAtOnce(3);

}  // namespace
