#include "fiber.h"

#include <cstdint>
#include <sys/mman.h>

// System V calling convention: rbx, rbp and r12-r15 belong to the caller.  `ret` jumps to the address on top of the new
// stack, which switch_stack or prepare() stored there.
asm(R"(
.text
.globl switch_stack
.hidden switch_stack
.type switch_stack, @function
switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size switch_stack, . - switch_stack
)");

static constexpr size_t SAVED_REGISTERS = 6;

void Stacks::reserve(size_t count) {
  if (count <= count_) return;
  if (memory_) munmap(memory_, count_ * SIZE);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  memory_ = (unsigned char*)mmap(nullptr, count * SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
  count_ = count;
  for (size_t i = 0; i < count; i++) mprotect(memory_ + i * SIZE, PAGE, PROT_NONE);
}

void Stacks::release_beyond(size_t most) {
  if (count_ <= most) return;
  munmap(memory_, count_ * SIZE);
  memory_ = nullptr, count_ = 0;
}

void* Stacks::prepare(size_t index, void (*entry)()) {
  // The alignment at the first instruction of a function: 8 bytes off a multiple of 16.  Staggered by about a cache line,
  // so that the stacks of all threads do not use the same cache sets.
  const uintptr_t end = (uintptr_t)(memory_ + (index + 1) * SIZE) - 64 - index % 32 * 128;
  void** top = (void**)(end & ~(uintptr_t)15) - 1;
  *top = nullptr;  // the entry's return address, never used
  *--top = (void*)entry;
  for (size_t i = 0; i < SAVED_REGISTERS; i++) *--top = nullptr;
  return top;
}

bool Stacks::contains(size_t index, const void* address, size_t n_bytes) const {
  const unsigned char* start = memory_ + index * SIZE;
  return (const unsigned char*)address >= start && (const unsigned char*)address + n_bytes <= start + SIZE;
}
