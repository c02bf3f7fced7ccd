// The watchdog: one thread that watches all communicators, and what calls tell it.
//
// The watchdog calls the library without its lock, except for queries that return immediately. Calls that may
// take long (revoke, abort) run in threads of their own.
#pragma once

#include "watch.h"

#pragma GCC visibility push(hidden)

// Around a call on a communicator with a watch. In check mode `announce` tells the other ranks what this rank
// is about to call, and `compare` waits for what they call. After PYNCCL_STOPPED and PYNCCL_TOO_LATE the call
// may be made again, and then goes on, see pynccl_check_resume.
int pynccl_watch_announce(pynccl_comm* comm, const pynccl_call* calls, int count);
int pynccl_watch_compare(pynccl_comm* comm);
// Whether this is the call again that an interrupt has stopped.
int pynccl_watch_resumes(const pynccl_comm* comm);
void pynccl_watch_begin(pynccl_comm* comm, const pynccl_call* calls, int count);
void pynccl_watch_end(pynccl_comm* comm);

#pragma GCC visibility pop
