#include "base/guard.hpp"

#include <system_error>

#include "base/memory.hpp"

namespace pncpu {

ncclResult_t exception_result(const char* function) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return fail(ncclSystemError, "%s: out of memory: %zu bytes were asked for", function,
                failed_allocation());
  } catch (const std::system_error& error) {
    return fail(ncclSystemError, "%s: %s", function, error.what());
  } catch (const std::exception& error) {
    return fail(ncclInternalError, "%s: %s", function, error.what());
  }
}

}  // namespace pncpu
