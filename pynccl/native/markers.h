// Events behind the calls of each stream. They show the watchdog that a stream makes no progress.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

void pynccl_event_free(const pynccl_watch* w, uintptr_t event);
// Only for the thread that has just issued on the stream: a capture forbids other threads to use it.
void pynccl_mark(pynccl_watch* w, uintptr_t stream);
// The issue time of the oldest outstanding calls, and their stream; 0: none.
int64_t pynccl_oldest(pynccl_watch* w, uintptr_t* stream);

#pragma GCC visibility pop
