// Stacks that are switched by hand.  Each CUDA thread has one, and yields only when it must wait.
#pragma once
#include <cstddef>

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

// Save the registers that a call must preserve on the running stack, store its position in *from and continue at `to`.
extern "C" void switch_stack(void** from, void* to);

class Stacks {
 public:
  // Bytes of one stack; pages are allocated on first use.  The number of pages is odd, because with a power of two all
  // stacks would compete for a few entries of the processor's TLB.
  static constexpr size_t PAGE = 4096, SIZE = 65 * PAGE;
  // Allocate at least `count` stacks, each above a page that traps.
  void reserve(size_t count);
  // Free all stacks if there are more than `most`: each is two mappings, and a process is limited to 65,530.
  void release_beyond(size_t most);
  // Return a fresh stack that calls `entry` when it is first switched to; `entry` must never return.
  void* prepare(size_t index, void (*entry)());
  bool contains(size_t index, const void* address, size_t n_bytes) const;

 private:
  unsigned char* memory_ = nullptr;
  size_t count_ = 0;
};
