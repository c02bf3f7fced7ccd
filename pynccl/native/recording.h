// The list in which this thread's calls are recorded. calls.c defines it; open.c opens and closes lists.
#pragma once

struct pynccl_list;

#pragma GCC visibility push(hidden)

// The innermost open list; NULL: calls run.
extern __thread struct pynccl_list* pynccl_recording;

#pragma GCC visibility pop
