// What arrives over the control channel, and what it changes in what is known of its sender.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Take all that a rank has sent so far.
void pynccl_read(pynccl_watch* w, int rank);

#pragma GCC visibility pop
