// What a kind of call is called, and what its arguments include; library.h has the names of NCCL's datatypes
// and operations.
#pragma once

#include "library.h"

#pragma GCC visibility push(hidden)

// "something unknown" for a number without a kind.
const char* pynccl_kind_name(int kind);
// "" for a call without one.
const char* pynccl_kind_function(int kind);
int pynccl_reduces(int kind);
int pynccl_has_root(int kind);

#pragma GCC visibility pop
