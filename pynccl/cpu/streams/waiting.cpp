#include "streams/waiting.hpp"

namespace pncpu {
Contention g_contention;
}  // namespace pncpu
