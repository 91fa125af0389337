// Stacks that are switched by hand: each CUDA thread runs on one, and gives way only where it has to wait.
#pragma once
#include <cstddef>

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

// Saves the registers that a call must preserve on the running stack, stores its place in *from and goes on at `to`.
extern "C" void switch_stack(void** from, void* to);

class Stacks {
 public:
  // Of one stack; memory is taken only as it is touched.  An odd number of pages: with a power of two, the stacks of all
  // threads would compete for a few entries of the processor's TLB.
  static constexpr size_t PAGE = 4096, SIZE = 65 * PAGE;
  // Makes room for at least `count` stacks, each with a page below it that traps.
  void reserve(size_t count);
  // Gives them back if they are more than `most`: each is two mappings, of which a process has 65,530, and modules stay.
  void release_beyond(size_t most);
  // A fresh stack that starts `entry` when it is first switched to; `entry` must never return.
  void* prepare(size_t index, void (*entry)());
  bool contains(size_t index, const void* address, size_t n_bytes) const;

 private:
  unsigned char* memory_ = nullptr;
  size_t count_ = 0;
};
