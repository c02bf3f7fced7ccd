// Which list this thread's calls are recorded in. Only fastcall.c opens and closes one.
#pragma once

#include "calls.h"

#pragma GCC visibility push(hidden)

// The innermost of those that are open; NULL: calls run.
extern __thread pynccl_list* pynccl_recording;

#pragma GCC visibility pop
