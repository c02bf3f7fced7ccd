// Frames that arrive over the control channel, and how they change the sender's state.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Handle all frames that a rank has sent so far.
void pynccl_read(pynccl_watch* w, int rank);

#pragma GCC visibility pop
