#include "base/guard.hpp"

#include <system_error>

#include "base/memory.hpp"

namespace pncpu {

ncclResult_t exception_result(const char* function) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return fail_in(function, ncclSystemError, "out of memory: %zu bytes were asked for", failed_allocation());
  } catch (const std::system_error& error) {
    return fail_in(function, ncclSystemError, "%s", error.what());
  } catch (const std::exception& error) {
    return fail_in(function, ncclInternalError, "%s", error.what());
  }
}

}  // namespace pncpu
