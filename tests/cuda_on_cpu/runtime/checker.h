// Check mode: every access to shared and global memory is judged before it is made.
//
// Races are found by happens-before: each thread has a clock and knows, of each other thread, up to which time that one's
// accesses come before its own (a vector clock).  Barriers exchange this knowledge; shuffles and votes do not.  Two accesses
// of one byte, at least one a write, neither before the other, are a race, whatever order this run took.
#pragma once
#include <vector>

#include "access.h"
#include "machine.h"

struct AsyncCopy {
  u64 to, from;
  u32 n_bytes, n_from;  // bytes beyond n_from are filled with zeros
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
