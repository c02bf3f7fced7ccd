// What a process says of its ranks when another process of the job asks (HelloKind::Ask): a Speaker, then for
// each rank a RankState and a RankPlace for every rank of its communicator.
#pragma once

#include "service/wire.hpp"

namespace pncpu {

struct Speaker {
  Token process;
  int64_t pid = 0;
  char host_name[64] = {};
};

constexpr size_t kCountedKinds = 8;  // of collectives, in the order of kRasCollectives

struct RankState {
  uint64_t hash = 0;
  int32_t rank = 0, nranks = 0;
  int32_t init_state = 0, async_error = 0;  // ncclResult_t
  uint8_t finalized = 0, destroyed = 0, aborted = 0;
  uint8_t pad[5] = {};
  uint64_t counts[kCountedKinds] = {};
};

enum class Presence : uint32_t { Here, Left, Dead };

struct RankPlace {
  Token process, unix_name;
  uint64_t host = 0;
  int64_t pid = 0;
  Endpoint endpoint;
  int32_t device = 0;
  Presence presence = Presence::Here;
  char host_name[64] = {};
};

template <class T>
void append(std::vector<char>* out, const T& what) {
  size_t before = out->size();
  out->resize(before + sizeof what);
  memcpy(out->data() + before, &what, sizeof what);
}

}  // namespace pncpu
