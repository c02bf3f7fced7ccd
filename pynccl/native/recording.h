// Which list this thread's calls are recorded in: calls.c has it, and fastcall.c opens and closes lists.
#pragma once

struct pynccl_list;

#pragma GCC visibility push(hidden)

// The innermost of those that are open; NULL: calls run.
extern __thread struct pynccl_list* pynccl_recording;

#pragma GCC visibility pop
