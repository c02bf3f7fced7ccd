// Check mode: the ranks compare a call over the control channel before they issue it.
//
// A rank announces its call to every peer that takes part, and waits until the peer has announced the
// counterpart: the same collective, or the other side of a message. If the announcements differ, or if two
// ranks wait for different calls, no rank issues its call. Every rank then gets a table of all calls and
// their places in the program.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Announce calls to the peers. The last frame to each peer says that this rank now waits.
int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count);
// Wait for the counterparts.
int pynccl_check_wait(pynccl_watch* w);

#pragma GCC visibility pop
