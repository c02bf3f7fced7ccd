// What is wrong with a communicator: found out, told to the other ranks, and ended.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// A detached thread that handles no signals; answers 0 or an errno.
int pynccl_start_thread(void* (*work)(void*), void* argument);
// The verdict is written: publish it, tell the other ranks, and end what is outstanding.
void pynccl_publish(pynccl_watch* w, int trouble);
void pynccl_conclude(pynccl_watch* w, const pynccl_verdict* found);
// Publish which ranks have failed, if any has and if it is not known better to others.
void pynccl_conclude_failed(pynccl_watch* w);
// Whether it is not known yet of every rank whether it responds, when something has been late since then.
int pynccl_unsure(const pynccl_watch* w, int64_t late);
// Say why something took too long: silent ranks, or what every rank has called.
void pynccl_explain(const pynccl_watch* w, const char* what, pynccl_verdict* v);

#pragma GCC visibility pop
