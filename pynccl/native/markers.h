// Events behind the calls of each stream, by which the watchdog sees that a stream does not get on.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

void pynccl_event_free(const pynccl_watch* w, uintptr_t event);
// By the thread that has just issued on the stream: nobody else may touch a stream, which may be captured.
void pynccl_mark(pynccl_watch* w, uintptr_t stream);
// Answers since when calls of the communicator have been outstanding on a stream; 0 when none has.
int64_t pynccl_oldest(pynccl_watch* w, uintptr_t* stream);

#pragma GCC visibility pop
