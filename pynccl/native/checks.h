// Check mode: the ranks compare a call over the control channel before they issue it.
//
// Collectives are numbered. A rank begins the round of one by telling its call to the next rank. In step k it
// waits for the call of the rank 2^k before it, and if that is the same as its own, tells it to the rank
// 2^(k+1) after it: that rank then knows that 2^(k+1) ranks have called the same. After log2(n) steps all
// have; each rank sends log2(n) frames, to neighbours. The watchdog's thread makes the steps.
//
// A send or recv is told to its peer, and the rank waits until the peer has told the other side.
//
// If the wait lasts, the rank sends a probe to each rank for whose frames it waits. A rank that has not sent
// the frame for which the sender of the probe waits, and must end a wait of its own before it can do so,
// passes the probe on once to the ranks for which it waits, also on another communicator. A probe that comes
// back has found a ring of ranks (the edge chasing of Chandy, Misra and Haas, 1983): each waits for all calls
// of its group, so none of them can go on. A rank that has announced a collective makes its steps whether it
// waits or not: there a probe goes to the rank whose frame the next step needs.
//
// An interrupted wait can go on: what was announced stays so until the next call, see pynccl_check_resume.
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
