// Frames that arrive over the control channel, and how they change the sender's state.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Handle what came before the watch started. The thread that reads does so before what comes later.
void pynccl_catch_up(pynccl_watch* w);
// Handle all frames that have come over a line so far. The caller has a reference.
void pynccl_read(pynccl_line* line);

#pragma GCC visibility pop
