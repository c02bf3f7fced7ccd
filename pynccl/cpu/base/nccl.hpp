// NCCL's C API and this library's additions, for C++. Only this file includes the declarations.
#pragma once

#include <cstddef>
#include <cstdint>

#define _Bool bool
extern "C" {
#pragma GCC visibility push(default)
// clang-format off: the second needs the first
#include "api/nccl_api.h"
#include "api/cpu_api.h"
// clang-format on
#pragma GCC visibility pop
}
#undef _Bool
