// Creations that a group holds and never runs, or runs in vain: whoever has the handles can end them, at
// once.
#include "ranks.hpp"

using namespace testing;

namespace {

// What makes communicators inside a group; `parent` is for those that derive one.
struct Maker {
  const char* name;
  bool blocking;
  void (*make)(ncclComm_t parent, ncclConfig_t* config, std::vector<ncclComm_t>* made);
};

void init_all(ncclComm_t, ncclConfig_t*, std::vector<ncclComm_t>* made) {
  made->resize(3);
  OK(ncclCommInitAll(made->data(), 3, nullptr));
}

void init_rank(ncclComm_t, ncclConfig_t*, std::vector<ncclComm_t>* made) {
  ncclUniqueId id = new_id();
  made->resize(2);
  for (int r = 0; r < 2; ++r) OK(ncclCommInitRank(&(*made)[size_t(r)], 2, id, r));
}

void init_rank_config(ncclComm_t, ncclConfig_t* config, std::vector<ncclComm_t>* made) {
  ncclUniqueId id = new_id();
  made->resize(2);
  for (int r = 0; r < 2; ++r) OK(ncclCommInitRankConfig(&(*made)[size_t(r)], 2, id, r, config));
}

void init_rank_scalable(ncclComm_t, ncclConfig_t* config, std::vector<ncclComm_t>* made) {
  ncclUniqueId ids[2] = {new_id(), new_id()};
  made->resize(2);
  for (int r = 0; r < 2; ++r) OK(ncclCommInitRankScalable(&(*made)[size_t(r)], 2, r, 2, ids, config));
}

// The rank that exists and the one that joins it.
void grow(ncclComm_t parent, ncclConfig_t* config, std::vector<ncclComm_t>* made) {
  ncclUniqueId id;
  OK(ncclCommGetUniqueId(parent, &id));
  made->resize(2);
  OK(ncclCommGrow(parent, 2, &id, -1, &(*made)[0], config));
  OK(ncclCommGrow(nullptr, 2, &id, 1, &(*made)[1], config));
}

constexpr Maker kMakers[] = {
    {"ncclCommInitAll", true, init_all},
    {"ncclCommInitRank", true, init_rank},
    {"ncclCommInitRankConfig", true, init_rank_config},
    {"ncclCommInitRankConfig", false, init_rank_config},
    {"ncclCommInitRankScalable", true, init_rank_scalable},
    {"ncclCommInitRankScalable", false, init_rank_scalable},
    {"ncclCommGrow", true, grow},
    {"ncclCommGrow", false, grow},
};

// How the open group ends.
using Mishap = void (*)(const std::vector<ncclComm_t>& handles, bool blocking);

void group_fails(const std::vector<ncclComm_t>&, bool) {
  ncclComm_t wrong = nullptr;
  RESULT(ncclCommInitRank(&wrong, 0, ncclUniqueId{}, 0), ncclInvalidArgument);
  CHECK(wrong == nullptr);
  RESULT(ncclGroupEnd(), ncclInvalidArgument);
}

void group_is_simulated(const std::vector<ncclComm_t>&, bool) {
  ncclSimInfo_t info{sizeof info, NCCL_SIM_INFO_MAGIC, 23203, 0};
  OK(ncclGroupSimulateEnd(&info));
}

// Another thread does not know that the group is still open.
void group_loses_one(const std::vector<ncclComm_t>& handles, bool blocking) {
  std::thread([&] { OK(ncclCommAbort(handles[0])); }).join();
  ncclResult_t r = ncclGroupEnd();
  if (!blocking) return void(RESULT(r, ncclInProgress));
  CHECK((r != ncclSuccess && r != ncclInProgress));
}

bool at_rest(ncclComm_t comm) {
  return soon(30, [&] {
    ncclResult_t state;
    return ncclCommGetAsyncError(comm, &state) != ncclSuccess || state != ncclInProgress;
  });
}

// `made` holds what the library left its caller of `handles`.
void end_all(const std::vector<ncclComm_t>& handles, const std::vector<ncclComm_t>& made,
             ncclResult_t (*end)(ncclComm_t), size_t ended) {
  for (size_t i = 0; i < handles.size(); ++i) {
    CHECK((made[i] == nullptr || made[i] == handles[i]));
    CHECK(at_rest(handles[i]));
    bool left = made[i] != nullptr && i >= ended;
    RESULT(end(handles[i]), left ? ncclSuccess : ncclInvalidArgument);
    RESULT(end(handles[i]), ncclInvalidArgument);
  }
}

// A config of NCCL 2.14, which had this one field.
ncclConfig_t config_of(bool blocking) {
  ncclConfig_t config;
  memset(static_cast<void*>(&config), 0, sizeof config);
  config.size = offsetof(ncclConfig_t, blocking) + sizeof config.blocking;
  config.magic = NCCL_API_MAGIC;
  config.version = 21400;
  config.blocking = blocking;
  return config;
}

void create_in_vain(Mishap mishap, bool loses_one) {
  set("PYNCCL_CPU_INIT_TIMEOUT", "1");
  for (ncclComm_t comm : together(2)) OK(ncclCommDestroy(comm));
  Has before = process_has();
  for (const Maker& maker : kMakers)
    for (auto end : {ncclCommAbort, ncclCommDestroy}) {
      alarm(60);
      at_step("%s, %s, %s", maker.name, maker.blocking ? "blocking" : "non-blocking",
              end == ncclCommAbort ? "abort" : "destroy");
      ncclConfig_t config = config_of(maker.blocking);
      ncclComm_t parent = alone();
      std::vector<ncclComm_t> made;
      OK(ncclGroupStart());
      maker.make(parent, &config, &made);
      std::vector<ncclComm_t> handles = made;
      for (ncclComm_t handle : handles) CHECK(handle != nullptr);
      mishap(handles, maker.blocking);
      end_all(handles, made, end, loses_one ? 1 : 0);
      OK(ncclCommDestroy(parent));
      if (failures) fprintf(stderr, "at %s\n", current_step);
      if (failures) return;
    }
  CHECK(settles_to(before));
}

TEST_CASE("in a group that fails") { create_in_vain(group_fails, false); }
TEST_CASE("in a group that is simulated") { create_in_vain(group_is_simulated, false); }
TEST_CASE("in a group that loses one") { create_in_vain(group_loses_one, true); }

// The thread that opened the group ends with it still open: nobody will ever run what it holds.
TEST_CASE("in a group that is left open") {
  for (ncclComm_t comm : together(2)) OK(ncclCommDestroy(comm));
  Has before = process_has();
  for (auto end : {ncclCommAbort, ncclCommDestroy}) {
    alarm(30);
    std::vector<ncclComm_t> handles;
    std::thread([&] {
      std::vector<ncclComm_t> made;
      OK(ncclGroupStart());
      init_all(nullptr, nullptr, &made);
      handles = made;
    }).join();
    end_all(handles, handles, end, 0);
  }
  CHECK(settles_to(before));
}

// A destruction that a group holds, whose thread ends: it is taken back.
TEST_CASE("a destruction in a group that is left open") {
  for (auto end : {ncclCommAbort, ncclCommDestroy}) {
    alarm(30);
    ncclComm_t comm = alone();
    std::thread([&] {
      OK(ncclGroupStart());
      OK(ncclCommDestroy(comm));
    }).join();
    OK(end(comm));
    RESULT(end(comm), ncclInvalidArgument);
  }
}

}  // namespace

// Rank 3 is kept by rank 0 alone, so it cannot see the difference itself.
TEST_CASE("by ranks that exclude different ranks") {
  for (int flags : {NCCL_SHRINK_DEFAULT, NCCL_SHRINK_ABORT}) {
    alarm(60);
    std::vector<ncclComm_t> comms = together(4);
    as_threads(4, [&](int rank) {
      int excluded[] = {2, 3};
      ncclComm_t made = nullptr;
      if (rank == 2) return;
      RESULT(ncclCommShrink(comms[size_t(rank)], excluded, rank == 1 ? 2 : 1, &made, nullptr, flags),
             ncclInvalidUsage);
      CHECK(made == nullptr);
      SAYS(last_error(comms[size_t(rank)]), "rank 1 called ncclCommShrink without ranks [2, 3]");
      // A later attempt does not wait, either.
      RESULT(ncclCommShrink(comms[size_t(rank)], excluded, 1, &made, nullptr, flags), ncclInvalidUsage);
    });
    for (ncclComm_t comm : comms) OK(ncclCommAbort(comm));
  }
}
