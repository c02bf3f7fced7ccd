// Verdicts: find out what is wrong with a communicator, tell the other ranks, and end outstanding calls.
#pragma once

#include "channel.h"

#pragma GCC visibility push(hidden)

// Start a detached thread that handles no signals. Returns 0 or an errno.
int pynccl_start_thread(void* (*work)(void*), void* argument);
void pynccl_add_rank(pynccl_verdict* v, int rank);
// Publish the verdict in the watch, tell the other ranks, and end outstanding calls.
void pynccl_publish(pynccl_watch* w, int trouble);
void pynccl_conclude(pynccl_watch* w, const pynccl_verdict* found);
// Publish which ranks have failed, unless none has or other ranks may know more.
void pynccl_conclude_failed(pynccl_watch* w);
// Whether a rank may still prove that it responds: it has sent nothing since `late`, and is not silent long
// enough to be named.
int pynccl_unsure(pynccl_watch* w, int64_t late);
// Tell the others which ranks are silent, and return how many.
int pynccl_report_silence(pynccl_watch* w);
// At a time-out wait, under the lock, until ranks that may be silent have been heard, and for the reports of
// the others; tell them which ranks are silent here.
void pynccl_hear_all(pynccl_watch* w);
// Say why a call took too long: name silent ranks, or those for which it waits and what every rank has
// called. `count` is 0 if the caller does not know for which. `heard`: after pynccl_mark_awaited and
// pynccl_hear_all; without these the news of the other ranks may be older than the call.
void pynccl_explain(pynccl_watch* w, const char* what, const int* awaited, int count, int heard,
                    pynccl_verdict* v);

#pragma GCC visibility pop
