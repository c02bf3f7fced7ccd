// Memory from ncclMemAlloc for torch's allocator, which takes C functions. torch frees a segment whenever it
// wants; the segment lives until nobody pins it: a registration that uses it does.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Pin the segment that begins here, and return its bytes; 0: there is none, or it was freed.
size_t pynccl_segment_pin(uintptr_t begin);
void pynccl_segment_unpin(uintptr_t begin);
// The bytes of all segments, also of those that were freed and are still pinned.
size_t pynccl_segment_bytes(void);
