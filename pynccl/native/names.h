// What dumps, verdicts and tables call kinds of calls; library.h has NCCL's datatypes and operations.
#pragma once

#include "library.h"

#pragma GCC visibility push(hidden)

// "something unknown" for what is no kind.
const char* pynccl_kind_name(int kind);

#pragma GCC visibility pop
