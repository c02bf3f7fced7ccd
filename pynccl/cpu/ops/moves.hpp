// Moves bytes between this rank and one peer in slices, for schedules and messages.
#pragma once

#include "ops/context.hpp"

namespace pncpu {

constexpr size_t kSlice = size_t(1) << 20;  // bytes moved in one step

// Each continues at *done. Done: all `bytes` have moved.
Step pipe_out(Pipe& pipe, const char* from, size_t bytes, size_t* done);
Step pipe_in(Pipe& pipe, char* to, size_t bytes, size_t* done);
// The uint64_t addresses are the peer's. `doing` names the operation in errors.
Step direct_in(const Context& context, int peer, uint64_t from, char* to, size_t bytes, size_t* done,
               bool identify, const char* doing);
Step direct_out(const Context& context, int peer, const char* from, uint64_t to, size_t bytes, size_t* done,
                const char* doing);
// The peer's buffer is mapped here.
Step mapped_in(const Context& context, int peer, const char* from, char* to, size_t bytes, size_t* done);
Step mapped_out(const Context& context, int peer, const char* from, char* to, size_t bytes, size_t* done);
Step direct_failed(const Context& context, int peer, RemoteResult result, const char* doing);

}  // namespace pncpu
