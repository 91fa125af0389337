// Converts rows of float32 to the units of activations.cuh, for weights of FORMAT.
#include "activations.cuh"

// A power of two that scales a row's values to at most 2^15, so that values and remainders fit f16; 1 if the largest
// value is not finite, or 0.
DEVICE float power_for_half(int largest_bits) {
  const int exponent = largest_bits >> 23;  // 127 for 1 ... 2
  if (exponent == 0 || exponent == 255) return 1.0f;
  return __int_as_float(min(max(127 + 14 + 127 - exponent, 1), 253) << 23);
}

// The largest magnitude of a row, as bits, in all threads of the block.
DEVICE int largest_of_row(const float* row, int n_in) {
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  int mine = 0;
  for (int column = 4 * threadIdx.x; column < n_in; column += 4 * blockDim.x)
    mine = max(mine, largest_magnitude(load_four(row, column, n_in)));
  atomicMax(&largest, mine);
  __syncthreads();
  return largest;
}

template <class F>
DEVICE void store_floats(float4 v, void* units, int column, int row, int n_rows) {
  if constexpr (F::Codes::BITS == 16) {
    const uint2 words = make_uint2(F::from_float(v.x) | (uint32_t)F::from_float(v.y) << 16,
                                   F::from_float(v.z) | (uint32_t)F::from_float(v.w) << 16);
    ((uint2*)units)[((int64_t)(column / 8) * n_rows + row) * 2 + column % 8 / 4] = words;
  } else {
    ((float4*)units)[(int64_t)(column / 4) * n_rows + row] = v;
  }
}

// Converts a row of n_in columns; n_there is n_in, or 0 for a missing row.
template <class F>
DEVICE void quantise_row(const float* row, int n_there, int n_in, void* units, void* scales, int index, int n_rows) {
  const int n_columns = (n_in + RUN - 1) / RUN * RUN;  // so that whole warps stay together
  float power = 1.0f;
  if constexpr (IS_SAME<F, F16>) {
    power = power_for_half(largest_of_row(row, n_there));
    if (threadIdx.x == 0) ((float*)scales)[index] = 1.0f / power;
  }
  for (int column = 4 * threadIdx.x; column < n_columns; column += 4 * blockDim.x) {
    float4 v = load_four(row, column, n_there);
    if constexpr (IS_FLOAT<F>) {
      v = make_float4(v.x * power, v.y * power, v.z * power, v.w * power);
      store_floats<F>(v, units, column, index, n_rows);
    } else {
      store_codes(v, (int8_t*)units, (float2*)scales, column / RUN, index, n_rows);
    }
  }
}

// x: float32 rows of `stride` values, a multiple of 4; the first n_in of the head_stride values of each head are
// converted.
// n_there: number of rows.  rows: if not null, numbers of the rows of x; -1 for a missing row.
// units, scales: laid out for n_rows; missing rows are zeros.  Grid: (rows, heads).
extern "C" __global__ void __launch_bounds__(1024)
    quantise(const float* __restrict__ x, int x_stride, int n_in, const int* __restrict__ n_there,
             const int* __restrict__ rows, int head_stride, uint8_t* __restrict__ units, float* __restrict__ scales,
             int n_rows) {
  const int head = blockIdx.y, n_runs = (n_in + RUN - 1) / RUN;
  const int row = is_beyond(blockIdx.x, n_there) ? -1 : rows ? rows[blockIdx.x] : blockIdx.x;
  quantise_row<FORMAT>(x + (int64_t)row * x_stride + (int64_t)head * head_stride, row < 0 ? 0 : n_in, n_in,
                       units + UNIT * head * head_units<FORMAT>(n_runs, n_rows),
                       scales + head * head_scales<FORMAT>(n_runs, n_rows), blockIdx.x, n_rows);
}
