// Moves bytes between this rank and one peer, a slice at a time: what schedules and messages have in common.
#pragma once

#include "ops/context.hpp"

namespace pncpu {

constexpr size_t kSlice = size_t(1) << 20;  // moved at a time between two looks at everything else

// Each goes on from *done towards `bytes`: Done when it is there.
Step pipe_out(Pipe& pipe, const char* from, size_t bytes, size_t* done);
Step pipe_in(Pipe& pipe, char* to, size_t bytes, size_t* done);
// `from` and `to` are addresses of the peer; `doing` is what a failure is told of.
Step direct_in(const Context& context, int peer, uint64_t from, char* to, size_t bytes, size_t* done,
               bool identify, const char* doing);
Step direct_out(const Context& context, int peer, const char* from, uint64_t to, size_t bytes, size_t* done,
                const char* doing);
Step direct_failed(const Context& context, int peer, RemoteResult result, const char* doing);

}  // namespace pncpu
