// The products of mma, for all types and shapes that the translator knows (instructions/tensor.py).
#include "tensor.h"

// Sums: integers wrap; floats are added exactly (in f64) and rounded to f32 once.  Nvidia does not document how the device
// truncates, so tests of float results need a tolerance on a GPU anyway.
static s32 add_product(s32 sum, s32 a, s32 b) { return (s32)((u32)sum + (u32)(a * b)); }
static f64 add_product(f64 sum, f64 a, f64 b) { return sum + a * b; }
static u32 sum_bits(s32 sum) { return (u32)sum; }
static u32 sum_bits(f64 sum) { return bits_of((f32)sum); }
static void start_sum(s32& sum, u32 bits) { sum = (s32)bits; }
static void start_sum(f64& sum, u32 bits) { sum = f32_of(bits); }

template <class A, class B, int M, int K>
void multiply_fragments(Meeting& meeting) {
  constexpr int N = 8, HALVES = M / 8, PER = A::PER, ACCUMULATORS = M / 4;
  constexpr int B_REGISTERS = K / (4 * PER), A_REGISTERS = B_REGISTERS * HALVES;
  typedef Fragments<A_REGISTERS, B_REGISTERS, ACCUMULATORS> In;
  typedef decltype(A::value(0, 0)) Number;
  if (meeting.arrived != FULL_MASK) fail("collective", "mma needs all 32 lanes, at <site %d>", meeting.site);
  Number a[M][K], b[K][N], sums[M][N];
  for (int lane = 0; lane < WARP_SIZE; lane++) {
    const In& in = input_of<In>(meeting, lane);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < A_REGISTERS; r++)
      for (int e = 0; e < PER; e++) a[g + 8 * (r % HALVES)][PER * t + e + 4 * PER * (r / HALVES)] = A::value(in.a[r], e);
    for (int r = 0; r < B_REGISTERS; r++)
      for (int e = 0; e < PER; e++) b[PER * t + e + 4 * PER * r][g] = B::value(in.b[r], e);
    for (int i = 0; i < ACCUMULATORS; i++) start_sum(sums[g + 8 * (i / 2)][2 * t + i % 2], in.c[i]);
  }
  for (int row = 0; row < M; row++)
    for (int k = 0; k < K; k++)
      for (int col = 0; col < N; col++) sums[row][col] = add_product(sums[row][col], a[row][k], b[k][col]);
  for (int lane = 0; lane < WARP_SIZE; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < ACCUMULATORS; i++)
      output_of<Registers<ACCUMULATORS>>(meeting, lane).r[i] = sum_bits(sums[g + 8 * (i / 2)][2 * t + i % 2]);
  }
}

template void multiply_fragments<F16, F16, 16, 16>(Meeting&);
template void multiply_fragments<F16, F16, 16, 8>(Meeting&);
template void multiply_fragments<BF16, BF16, 16, 16>(Meeting&);
template void multiply_fragments<BF16, BF16, 16, 8>(Meeting&);
template void multiply_fragments<TF32, TF32, 16, 8>(Meeting&);
template void multiply_fragments<TF32, TF32, 16, 4>(Meeting&);
#define INTEGERS(A, B)                                          \
  template void multiply_fragments<A, B, 16, 32>(Meeting&);     \
  template void multiply_fragments<A, B, 16, 16>(Meeting&);     \
  template void multiply_fragments<A, B, 8, 16>(Meeting&);
INTEGERS(S8, S8)
INTEGERS(S8, U8)
INTEGERS(U8, S8)
INTEGERS(U8, U8)
