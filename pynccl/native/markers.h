// Events behind the calls of each stream. They show the watchdog that a stream makes no progress.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

void pynccl_event_free(const pynccl_watch* w, uintptr_t event);
// Only for the thread that has just issued on the stream: a capture forbids other threads to use it.
void pynccl_mark(pynccl_watch* w, uintptr_t stream);
// Whether there are outstanding calls; then copies the marker whose first event is behind the oldest of them.
int pynccl_oldest(pynccl_watch* w, pynccl_marker* oldest);

#pragma GCC visibility pop
