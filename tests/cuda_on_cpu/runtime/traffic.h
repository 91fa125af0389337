// Count memory traffic per instruction: sectors of global memory and passes over the banks of shared memory, and the least
// number possible.
#pragma once
#include "types.h"

namespace traffic {
void begin_launch(int n_threads);
void record(int site, int thread, u64 address, u32 n_bytes, bool is_write, bool is_shared);
void end_block();
}  // namespace traffic
