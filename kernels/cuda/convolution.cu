// Causal convolutions along a sequence, whose last inputs are its state.
//
// A state is stored in the slot given by the batch, `slot_floats` values per slot, and is zero before position 0,
// regardless of the slot's content.
#include "batch.cuh"
#include "common.cuh"

constexpr int CONV_THREADS = 128, CONV_TOKENS = 32;

// y[t] = bias + sum over j of weight[j] * x[t + AHEAD - KERNEL + 1 + j], then silu, for n columns of x.
//
// With AHEAD, sequences are complete: inputs after a sequence are zeros.
//
// Grid: (blocks of 128 columns, sequences at once, blocks of 32 tokens).  weight: [KERNEL, stride], bias: or null.
// states: [KERNEL - 1, n] of a slot, the inputs before the batch.
extern "C" __global__ void __launch_bounds__(CONV_THREADS)
    causal_conv(const int* __restrict__ header, const int* __restrict__ starts, const int* __restrict__ positions,
                const int* __restrict__ slots, float* __restrict__ states, int64_t slot_floats,
                const float* __restrict__ x, int x_stride, int n, const float* __restrict__ weight,
                const float* __restrict__ bias, int silu, float* __restrict__ y) {
  const int column = blockIdx.x * CONV_THREADS + threadIdx.x;
  if (column >= n) return;
  for (int sequence = blockIdx.y; sequence < header[N_SEQUENCES]; sequence += gridDim.y) {
    const int start = starts[sequence], stop = starts[sequence + 1], first = start + CONV_TOKENS * blockIdx.z;
    if (first >= stop) continue;
    float* state = states + slots[sequence] * slot_floats + column;
    const bool goes_on = positions[start] > 0;
    float w[KERNEL], inputs[KERNEL];
#pragma unroll
    for (int j = 0; j < KERNEL; j++) w[j] = weight[(size_t)j * x_stride + column];
    const auto input = [&](int token) {
      if (AHEAD && token >= stop) return 0.0f;
      if (token >= start) return x[(size_t)token * x_stride + column];
      return goes_on ? state[(size_t)(token - start + KERNEL - 1) * n] : 0.0f;
    };
#pragma unroll
    for (int j = 0; j < KERNEL - 1; j++) inputs[j] = input(first + AHEAD - (KERNEL - 1) + j);
    if (blockIdx.z == 0) {  // only these blocks read the old state, and may write the new one
#pragma unroll 1
      for (int j = 0; j < KERNEL - 1; j++) state[(size_t)j * n] = input(stop - (KERNEL - 1) + j);
    }
    for (int token = first; token < min(first + CONV_TOKENS, stop); token++) {
      inputs[KERNEL - 1] = AHEAD ? input(token + AHEAD) : x[(size_t)token * x_stride + column];
      float total = bias ? bias[column] : 0.0f;
#pragma unroll
      for (int j = 0; j < KERNEL; j++) total = fmaf(inputs[j], w[j], total);
      y[(size_t)token * x_stride + column] = silu ? total * sigmoid(total) : total;
#pragma unroll
      for (int j = 0; j < KERNEL - 1; j++) inputs[j] = inputs[j + 1];
    }
  }
}
