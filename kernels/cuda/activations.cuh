// Layout of activations for matrix products.
//
// T rows (tokens) of n_in float32 values, padded with zeros to a multiple of 128 columns, are stored in units of 16
// bytes, as weights are: unit after unit along the columns, and row after row in each unit,
//
//   units   [columns / columns of a unit][T][16 bytes]     int8, 16 columns    for weights of integers
//                                                          f16 or bf16, 8      for F16 and BF16
//                                                          f32, 4              for F32
//
// so that both a warp that reads one row and the tiles of `mma` read them without gaps.  T is the number of rows of the
// layout; a batch may have fewer rows, and the remaining rows are zeros.  They are stored together with
//
//   scales  float2 [columns / 32][T]                       int8: the scale d of 32 columns, whose values are d * code;
//                                                          and d * the sum of the codes
//           float [T]                                      f16: a power of two to multiply the values by, so that all
//                                                          values are in the range of f16
//
// If each head has a separate matrix, units and scales in this layout are stored for each head, head after head.
#pragma once
#include "formats.cuh"

// Units and scales, as floats, of the activations of a head with a number of runs of 128 columns.
template <class F>
DEVICE int64_t head_units(int n_runs, int n_rows) {
  return (int64_t)n_runs * (IS_FLOAT<F> ? RUN * F::Codes::BITS / 8 / UNIT : RUN / UNIT) * n_rows;
}

template <class F>
DEVICE int64_t head_scales(int n_runs, int n_rows) {
  return IS_FLOAT<F> ? n_rows : (int64_t)n_runs * RUN_BLOCKS * 2 * n_rows;
}

// Columns column ... column + 3 of a row aligned to 16 bytes; zeros from column n on.
DEVICE float4 load_four(const float* row, int column, int n) {
  if (column >= n) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 v = *(const float4*)(row + column);
  if (column + 1 >= n) v.y = 0.0f;
  if (column + 2 >= n) v.z = 0.0f;
  if (column + 3 >= n) v.w = 0.0f;
  return v;
}

// The largest of the eight lanes with the same lane / 8; the bits of magnitudes have their order, and NaN is the
// largest.
DEVICE int largest_of_8_lanes(int bits) {
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) bits = max(bits, __shfl_xor_sync(FULL_MASK, bits, offset));
  return bits;
}

DEVICE int magnitude(float value) { return __float_as_int(value) & 0x7fffffff; }

DEVICE int largest_magnitude(float4 v) {
  return max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
}

// Rounds 128 columns of a row to int8, with the same bits as the CPU's kernels.  Called by a whole warp: lane i has
// columns 4 i ... 4 i + 3 and writes a word of a unit; every eighth lane also writes the scales.
//
// run: number of the 128 columns.  row, n_rows: row in the units, and rows of their layout.
DEVICE void store_codes(float4 v, int8_t* units, float2* scales, int run, int row, int n_rows) {
  const int lane = threadIdx.x % WARP;
  const float largest = __int_as_float(largest_of_8_lanes(largest_magnitude(v)));
  // False for NaN, which then becomes the scale.
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
