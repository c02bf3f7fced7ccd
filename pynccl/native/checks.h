// Check mode: the ranks compare a call over the control channel before they issue it.
//
// Collectives are numbered. A rank begins the round of one by telling its call to the next rank. In step k it
// waits for the call of the rank 2^k before it, and if that is the same as its own, tells it to the rank
// 2^(k+1) after it: that rank then knows that 2^(k+1) ranks have called the same. After log2(n) steps all
// have; each rank sends log2(n) frames, to neighbours. The watchdog's thread makes the steps.
//
// A send or recv is told to its peer, and the rank waits until the peer has told the other side.
//
// If the wait for messages lasts, the rank sends a probe to each peer that has not told the other side. A
// rank that waits for messages itself, and has not told the sender of the probe the other side, passes it on
// once to its own such peers. A probe that comes back has found a ring of ranks (the edge chasing of Chandy,
// Misra and Haas, 1983): each waits for all messages of its group, so none of them can go on.
//
// If two calls differ, or if two ranks wait for different calls, or ranks in a ring, no rank issues its call.
// Who finds that asks all, once, for what they have called, and every rank gets a table of the calls and
// their places in the program.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Announce calls to the peers. The last frame to a peer says that this rank now waits.
int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count);
// A frame of a comparison has come.
void pynccl_check_heard(pynccl_watch* w, int from, const pynccl_frame* frame);
// Wait for the counterparts.
int pynccl_check_wait(pynccl_watch* w);

#pragma GCC visibility pop
