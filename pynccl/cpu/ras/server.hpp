// The RAS server: a thread that answers NCCL's RAS clients at NCCL_RAS_ADDR while this process has ranks.
#pragma once

namespace pncpu {

// Starts it at the first rank of this process if NCCL_RAS_ENABLE or NCCL_RAS_ADDR asks for it. Never fails: a
// job runs without it. The first process of a host that can listen serves; the others try now and then.
void serve_ras();

}  // namespace pncpu
