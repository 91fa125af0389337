// The machine that kernels run on: the threads of one block at a time, their warps, barriers and schedule.
#pragma once
#include "types.h"

constexpr int WARP_SIZE = 32;
constexpr u32 FULL_MASK = 0xffffffffu;

struct Dim {
  u32 x, y, z;
};

// ---- arguments of the caller (module.py has the same structures)
struct MemoryRange {
  u64 address, n_bytes;
  u64 writable;
  u8* valid;  // one byte per byte of memory, 1 if it was written; null: all bytes were written
};
typedef void (*KernelFunction)(const u8* parameters);
enum class Schedule : u32 { forward, reverse, random };
enum class Copies : u32 { late, early, random };
struct Launch {
  u32 grid[3], block[3];
  KernelFunction kernel;
  const u8* parameters;
  u64 static_shared_bytes, dynamic_shared_bytes;
  Schedule schedule;
  Copies copies;
  u64 seed, step_limit;
  const MemoryRange* ranges;
  u64 n_ranges;
  u32 checking, counting;
  u32 mutation;  // number of the active planted mistake (mutate.py); 0: none
};

// ---- threads
enum class State : u8 { ready, at_block_barrier, at_warp_meeting, done };
struct Thread {
  void* stack_pointer;
  Dim id;
  int index, lane, warp;
  State state;
  int site;           // where it waits
  u32 steps_left;     // backward jumps until it gives way
  u64 slices_left;    // slices left until the thread counts as endless
  bool must_combine;  // woken to finish a meeting whose last lane exited
  struct AsyncCopies* copies;  // copies in progress
};
extern Thread* current;
extern u32 mutation;
extern Dim grid_size, block_size, block_id;
extern u8* shared_memory;  // of the running block; shared addresses count from here
extern u64 shared_bytes, static_shared_bytes;  // the first counts dynamic ones too, which come last

// End the launch with an error of a KernelFault's `kind`.  "<site 12>" in the text becomes the location of instruction 12.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- jumps backward: a kernel that never ends must not hang its test
void give_way(int site);
inline void step(int site) {
  if (__builtin_expect(--current->steps_left == 0, 0)) give_way(site);
}

// ---- meetings: instructions that the lanes of a warp run together (shfl, vote, mma, bar.warp.sync, …)
// Lanes wait for all lanes of the mask; the last one computes the results of all.
struct Meeting {
  u32 mask, arrived;
  int site;
  const void* inputs[WARP_SIZE];
  void* outputs[WARP_SIZE];
};
// Add the current lane.  Returns the meeting if this lane must combine the inputs, null if another lane has done it.
Meeting* enter_meeting(u32 mask, int site, const void* input, void* output);
void close_meeting(Meeting& meeting);

template <class In, class Out, class Combine>
inline Out meet(u32 mask, int site, const In& input, Combine combine) {
  Out output;
  if (Meeting* meeting = enter_meeting(mask, site, &input, &output)) {
    combine(*meeting);
    close_meeting(*meeting);
  }
  return output;
}
template <class In>
inline const In& input_of(const Meeting& meeting, int lane) {
  return *(const In*)meeting.inputs[lane];
}
template <class Out>
inline Out& output_of(const Meeting& meeting, int lane) {
  return *(Out*)meeting.outputs[lane];
}

// bar.warp.sync
void warp_barrier(u32 mask, int site);

// ---- block barriers: bar.sync / bar.arrive / bar.red; count 0 means all threads of the block
void block_barrier(u32 id, u32 count, int site);
void block_arrive(u32 id, u32 count, int site);
enum class Reduce { population, all, any };
u32 block_reduce(Reduce kind, u32 id, u32 count, bool value, int site);

// ---- cp.async
void async_copy(u64 to, u64 from, u32 n_bytes, u32 n_from, int site);
void async_commit();
void async_wait(u32 groups_left);  // until at most `groups_left` groups of this thread are in progress

u64 random_number();
