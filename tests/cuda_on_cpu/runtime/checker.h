// Check mode: every access to shared and global memory is checked before it is made.
//
// Races are found by happens-before.  Each thread has a clock, and stores for each other thread the time up to which the
// other thread's accesses precede its own (a vector clock).  Barriers exchange clocks; shuffles and votes do not.  Two
// accesses of one byte are a race if at least one writes and neither precedes the other, in whatever order they ran.
#pragma once
#include <vector>

#include "access.h"
#include "machine.h"

struct AsyncCopy {
  u64 to, from;
  u32 n_bytes, n_from;  // bytes after n_from become zero
  bool landed;
  int site;
};

namespace check {
void issue_copy(u64 to, u64 from, u32 n_bytes, u32 n_from, int site);
void finish_copy(const AsyncCopy& copy);
void synchronize(const std::vector<int>& members);  // of a barrier that opens

void begin_launch(const Launch& launch, int n_threads);
void begin_block();
void end_block();
void end_launch();

}  // namespace check
