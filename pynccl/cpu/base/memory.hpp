// The size of allocations that failed, for messages.
#pragma once

#include <cstddef>

namespace pncpu {

// The size of this thread's last failed allocation.
size_t failed_allocation();
// For a program that defines operator new itself.
void note_failed_allocation(size_t bytes);

}  // namespace pncpu
