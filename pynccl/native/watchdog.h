// The one thread that looks after all communicators, and what calls tell it.
//
// The library is called without the lock, except for questions that it answers at once; whatever may take
// long (revoke, abort) has a thread of its own.
#pragma once

#include "watch.h"

#pragma GCC visibility push(hidden)

// Around a call, of a communicator with a watch. Tell the other ranks what is about to be called.
int pynccl_watch_announce(pynccl_comm* comm, const pynccl_call* calls, int count);
int pynccl_watch_begin(pynccl_comm* comm, const pynccl_call* calls, int count);
void pynccl_watch_end(pynccl_comm* comm);

#pragma GCC visibility pop
