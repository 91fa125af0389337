// Activations as matrix products read them.
//
// T rows (tokens) of n_in float32 values, padded with zeros to a multiple of 128 columns, lie in units of 16 bytes as
// weights do: unit after unit along the columns, and in each unit row after row,
//
//   units   [columns / columns of a unit][T][16 bytes]     int8, 16 columns    for weights of integers
//                                                          f16 or bf16, 8      for F16 and BF16
//                                                          f32, 4              for F32
//
// so that both a warp that reads one row and the tiles of `mma` read them without gaps.  T is what the units are laid
// out for; a batch may have fewer rows, and the others are zeros.  Beside them
//
//   scales  float2 [columns / 32][T]                       int8: the scale d of 32 columns, of which the values are
//                                                          d * code; and d * the sum of the codes
//           float [T]                                      f16: a power of two that the values are to be multiplied
//                                                          with, so that none is beyond f16's range
//
// Where each head has a matrix of its own, the columns of each head have units and scales like these, head after head.
#pragma once
#include "formats.cuh"

// How many units the activations of a head take, of so many runs of 128 columns, and how many floats its scales.
template <class F>
DEVICE int64_t head_units(int n_runs, int n_rows) {
  return (int64_t)n_runs * (IS_FLOAT<F> ? RUN * F::Codes::BITS / 8 / UNIT : RUN / UNIT) * n_rows;
}

template <class F>
DEVICE int64_t head_scales(int n_runs, int n_rows) {
  return IS_FLOAT<F> ? n_rows : (int64_t)n_runs * RUN_BLOCKS * 2 * n_rows;
}

// Columns column ... column + 3 of a row whose address is a multiple of 16 bytes; zeros from n on.
DEVICE float4 load_four(const float* row, int column, int n) {
  if (column >= n) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 v = *(const float4*)(row + column);
  if (column + 1 >= n) v.y = 0.0f;
  if (column + 2 >= n) v.z = 0.0f;
  if (column + 3 >= n) v.w = 0.0f;
  return v;
}

// The largest of the eight lanes that share lane / 8; the bits of magnitudes are ordered as they are, with NaN last.
DEVICE int largest_of_8_lanes(int bits) {
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) bits = max(bits, __shfl_xor_sync(FULL_MASK, bits, offset));
  return bits;
}

DEVICE int magnitude(float value) { return __float_as_int(value) & 0x7fffffff; }

DEVICE int largest_magnitude(float4 v) {
  return max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
}

// Rounds 128 columns of a row to int8, with the same bits as the CPU's kernels.  A whole warp calls it, where lane i has
// columns 4 i ... 4 i + 3; it writes a word of a unit, and every eighth lane the scales.
//
// run: which 128 columns.  row, n_rows: of the units.
DEVICE void store_codes(float4 v, int8_t* units, float2* scales, int run, int row, int n_rows) {
  const int lane = threadIdx.x % WARP;
  const float largest = __int_as_float(largest_of_8_lanes(largest_magnitude(v)));
  // A NaN is not greater: it comes out as the scale.
  const float inverse = largest > NEGLIGIBLE ? LARGEST_CODE / largest : 0.0f;
  const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
  const int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
  const uint32_t word = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (uint32_t)d << 24;
  int sum = a + b + c + d;
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, offset);
  const int64_t unit = (int64_t)(run * (RUN / 16) + lane / 4) * n_rows + row;
  ((uint32_t*)units)[4 * unit + lane % 4] = word;
  const float scale = largest / LARGEST_CODE;
  if (lane % 8 == 0) scales[(int64_t)(run * RUN_BLOCKS + lane / 8) * n_rows + row] = make_float2(scale, scale * sum);
}
