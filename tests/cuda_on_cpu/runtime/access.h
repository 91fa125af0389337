// What generated code and the checker share (see checker.h).
#pragma once
#include "types.h"

namespace check {
enum class Access { read, write, atomic, atomic_read };
enum class Space { shared, global, generic };

void access(Space space, Access access, u64 address, u32 n_bytes, int site);
bool is_local(u64 address, u64 n_bytes);                         // on the current thread's own stack
void add_module_range(u64 address, u64 n_bytes, bool writable);  // a variable of the module
}  // namespace check
