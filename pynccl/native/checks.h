// Check mode: before a call is issued, the ranks that it concerns compare it over the control channel.
//
// A rank tells every peer what it is about to call with it, and waits until that peer has said the
// counterpart: the same collective, or the other side of a message. When both wait for what the other has not
// said, or when what they said differs, nothing is issued, and every rank gets the table of who called what
// from where.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Tell the peers; the last frame to each says that this rank waits now.
int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count);
// Wait for the counterparts.
int pynccl_check_wait(pynccl_watch* w);

#pragma GCC visibility pop
