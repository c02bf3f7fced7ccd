// Teams: subsets of a communicator's ranks. These functions return no status; the last error has the reason
// of a failure.
#include "base/guard.hpp"
#include "comm/lifecycle.hpp"

using namespace pncpu;

namespace {

// The answer of `body` for a usable communicator, else `wrong`.
template <class Value, class Body>
Value ask(const char* function, ncclComm_t handle, Value wrong, Body body) {
  Value answer = wrong;
  guarded(function, [&] {
    std::shared_ptr<Comm> comm;
    if (ncclResult_t r = comm_of(handle, function, &comm); r != ncclSuccess) return r;
    return body(*comm, &answer);
  });
  return answer;
}

template <class Make>
ncclTeam_t team(const char* function, ncclComm_t handle, Make make) {
  return ask(function, handle, ncclTeam_t{}, [&](Comm& comm, ncclTeam_t* answer) {
    *answer = make(comm);
    return ncclSuccess;
  });
}

// `own` returns this rank's number in the set in which the result counts.
template <class Own>
int rank_of(const char* function, ncclComm_t handle, ncclTeam_t team, int rank, Own own) {
  return ask(function, handle, -1, [&](Comm& comm, int* answer) {
    if (rank < 0 || rank >= team.nRanks)
      return fail_in(function, ncclInvalidArgument, "rank is %d, expected 0 to %d", rank, team.nRanks - 1);
    *answer = own(comm) + (rank - team.rank) * team.stride;
    return ncclSuccess;
  });
}

}  // namespace

extern "C" {

ncclTeam_t ncclTeamWorld(ncclComm_t comm) {
  return team("ncclTeamWorld", comm, [](Comm& c) { return ncclTeam_t{c.nranks, c.rank, 1}; });
}

ncclTeam_t ncclTeamLsa(ncclComm_t comm) {
  return team("ncclTeamLsa", comm, [](Comm& c) {
    int size = c.session.lsa_size();
    return ncclTeam_t{size, c.rank % size, 1};
  });
}

ncclTeam_t ncclTeamRail(ncclComm_t comm) {
  return team("ncclTeamRail", comm, [](Comm& c) {
    int size = c.session.lsa_size();
    return ncclTeam_t{c.nranks / size, c.rank / size, size};
  });
}

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  return rank_of("ncclTeamRankToWorld", comm, team, rank, [](Comm& c) { return c.rank; });
}

int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  return rank_of("ncclTeamRankToLsa", comm, team, rank,
                 [](Comm& c) { return c.rank % c.session.lsa_size(); });
}

}  // extern "C"
