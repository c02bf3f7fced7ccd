// No exception leaves an exported function.
#pragma once

#include "base/log.hpp"

namespace pncpu {

// Calls fail() for the exception that is being handled and returns its result.
ncclResult_t exception_result(const char* function);

template <class Body>
ncclResult_t guarded(const char* function, Body body) noexcept {
  try {
    return body();
  } catch (...) {
    return exception_result(function);
  }
}

#define REQUIRE_POINTER(function, pointer) \
  if (!(pointer)) return fail_in(function, ncclInvalidArgument, #pointer " is NULL")

}  // namespace pncpu
