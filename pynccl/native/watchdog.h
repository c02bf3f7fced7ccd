// The watchdog: one thread that watches all communicators, and what calls tell it.
//
// The watchdog calls the library without its lock, except for queries that return immediately. Calls that may
// take long (revoke, abort) run in threads of their own.
#pragma once

#include "watch.h"

#pragma GCC visibility push(hidden)

// Around a call on a communicator with a watch. `announce` tells the other ranks what this rank is about to
// call.
int pynccl_watch_announce(pynccl_comm* comm, const pynccl_call* calls, int count);
int pynccl_watch_begin(pynccl_comm* comm, const pynccl_call* calls, int count);
void pynccl_watch_end(pynccl_comm* comm);

#pragma GCC visibility pop
