// Memory that runs out: how much was asked for.
#pragma once

#include <cstddef>

namespace pncpu {

// The size of this thread's newest allocation that failed.
size_t failed_allocation();
// By an operator new that a program brings itself.
void note_failed_allocation(size_t bytes);

}  // namespace pncpu
