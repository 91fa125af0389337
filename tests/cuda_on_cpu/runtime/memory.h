// Loads, stores and atomics of generated code.  CHECKING is set for modules in check mode.
#pragma once
#include "access.h"
#include "machine.h"

using check::Access;
using check::Space;

inline u64 shared_address(u64 offset) { return (u64)shared_memory + (u32)offset; }

// Here and in other headers, some functions are not inlined, because g++ takes long to compile many copies.
[[gnu::noinline, noreturn]] inline void misaligned(Access access, u32 n_bytes, int site) {
  fail("misaligned", "%s of %u bytes at an address that is no multiple of that, at <site %d>",
       access == Access::read || access == Access::atomic_read ? "read" : "write", n_bytes, site);
}

inline void before_access(Space space, Access access, u64 address, u32 n_bytes, int site) {
  if (__builtin_expect(address & (n_bytes - 1), 0)) misaligned(access, n_bytes, site);
#ifdef CHECKING
  check::access(space, access, address, n_bytes, site);
#else
  (void)space;
#endif
}

template <class T>
inline T load(u64 address) {
  T value;
  memcpy(&value, (const void*)address, sizeof value);
  return value;
}
template <class T>
inline void store(u64 address, T value) {
  memcpy((void*)address, &value, sizeof value);
}

// Read, compute and write as one operation; returns the old value.
template <class T, class Update>
inline T atomic_update(Space space, u64 address, int site, Update update) {
  before_access(space, Access::atomic, address, sizeof(T), site);
  const T old = load<T>(address);
  store<T>(address, (T)update(old));
  return old;
}

inline bool is_shared(u64 address) { return address - (u64)shared_memory < shared_bytes; }
