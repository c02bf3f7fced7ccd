#include "streams/waiting.hpp"

namespace pncpu {
Crowd g_crowd;
}  // namespace pncpu
