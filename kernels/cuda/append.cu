// Operations between the query, key and value products and attention: RMS norm of each head, rotation, and cache
// writes.
//
// Compiled for KEY_DIM, VALUE_DIM; KEY_BITS, VALUE_BITS, 16 for halves; KEY_ROTATION, VALUE_ROTATION, the number of
// values that are rotated together, or 0; AXES (0 or 1); STRIDE, tokens per cache entry (the last one is stored);
// and POSITION_OFFSET, added to the position of heads before rotation.  cache.py shows the layout, cache_rounding.py
// defines rounding.  A warp computes one head, so that one token takes the time of a launch and a few dependent loads.
#include "batch.cuh"
#include "common.cuh"

#define KEY_HEAD ((KEY_DIM + 15) / 16 * 16)
#define VALUE_HEAD ((VALUE_DIM + 15) / 16 * 16)
#define HEAD (KEY_HEAD > VALUE_HEAD ? KEY_HEAD : VALUE_HEAD)
#define GROUPS ((HEAD + PER_SCALE - 1) / PER_SCALE)
#define HEADS_PER_BLOCK 4
#define PAGE_ROWS (STRIDE < PAGE ? PAGE / STRIDE : 1)

// As in kernels/ops.py.
constexpr float LARGEST_HALF = 65504.0f;

// Clamps to -limit ... limit; NaN stays NaN.
DEVICE float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// The cosine and sine of position * phase / 2^64 turns; the angle is exact before rounding, for any position.
DEVICE float2 turn(int position, uint64_t phase, float magnitude) {
  const int64_t turns = (int64_t)((uint64_t)position * phase);  // whole turns overflow, as intended
  float sine, cosine;
  sincospif((float)turns * 0x1p-63f, &sine, &cosine);
  return make_float2(cosine * magnitude, sine * magnitude);
}

// Stores a head of OWN values with padding at its place in a page.  Each lane has every 32nd value, and zeros for the
// padding.
template <int OWN, int BITS>
DEVICE void write_head(const float (&x)[GROUPS], uint8_t* entries, uint16_t* scales, size_t block, int place) {
  constexpr int OWN_GROUPS = (OWN + PER_SCALE - 1) / PER_SCALE, HALF = 1 << (BITS - 1);
  constexpr float CODE = BITS == 8 ? LARGEST_CODE : HALF;
  const int lane = threadIdx.x % WARP;
  entries += block * (PAGE_ROWS * OWN * BITS / 8);
#pragma unroll
  for (int group = 0; group < OWN_GROUPS; group++) {
    const int i = group * PER_SCALE + lane;
    if constexpr (BITS == 16) {
      const uint16_t half = float_to_half(clamp(x[group], LARGEST_HALF));
      if (i < OWN) ((uint16_t*)entries)[place * OWN + i] = half;
    } else {
      int bits = __float_as_int(x[group]) & 0x7FFFFFFF;  // so that NaN is the largest
#pragma unroll
      for (int step = WARP / 2; step; step /= 2) bits = max(bits, __shfl_xor_sync(FULL_MASK, bits, step));
      float largest = __int_as_float(bits);
      // The range of codes extends one further below 0: the value with the largest magnitude gets this code.
      if (BITS < 8) largest = __ballot_sync(FULL_MASK, x[group] == largest) ? -largest : largest;
      largest = clamp(largest, CODE * LARGEST_HALF);
      const float inverse = fabsf(largest) > NEGLIGIBLE ? CODE / largest : 0.0f;  // false for NaN, which then becomes the scale
      if (lane == 0) scales[(block * OWN_GROUPS + group) * PAGE + place] = float_to_half(largest / CODE);
      int code = __float2int_rn(clamp(x[group] * inverse, CODE));
      if constexpr (BITS == 8) {
        if (i < OWN) entries[place * OWN + i] = (uint8_t)code;
      } else {
        code = min(code, HALF - 1) + HALF;
        const int high = __shfl_xor_sync(FULL_MASK, code, 8) << 4, unit = (place * OWN + i) / 16;
        if (i < OWN && lane % 16 < 8) entries[8 * unit + lane % 8] = (uint8_t)((code & 15) | (high & 0xF0));
        if constexpr (BITS == 5) {
          const uint32_t fifths = __ballot_sync(FULL_MASK, code & 16);
          if (i < OWN && lane % 16 == 0)
            ((uint16_t*)(entries + PAGE * OWN / 2))[unit] = (uint16_t)(fifths >> lane);
        }
      }
    }
  }
}

// Rotates each group of SIZE values by a Hadamard matrix; 0 for none.
template <int SIZE>
DEVICE void rotate_together(float (&x)[GROUPS]) {
  if constexpr (SIZE > 0) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < (SIZE < WARP ? SIZE : WARP); step *= 2) {
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        const float other = __shfl_xor_sync(FULL_MASK, x[group], step);
        x[group] = lane & step ? other - x[group] : other + x[group];
      }
    }
#pragma unroll
    for (int step = 1; step < SIZE / WARP; step *= 2) {
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        if (group & step || group + step >= GROUPS) continue;
        const float first = x[group], second = x[group + step];
        x[group] = first + second, x[group + step] = first - second;
      }
    }
    const float factor = 1.0f / sqrtf((float)SIZE);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) x[group] *= factor;
  }
}

// RMS norm of the first `n` values of a head, none if n is 0; the weights are 1 without a pointer.
struct Norm {
  const float* weight;
  int n;
  float eps;
  __device__ __forceinline__ void apply(float (&x)[GROUPS]) const {
    if (n == 0) return;
    const int lane = threadIdx.x % WARP;
    float squares = 0.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
      if (group * PER_SCALE + lane < n) squares = fmaf(x[group], x[group], squares);
    const float scale = 1.0f / sqrtf(warp_sum(squares) / n + eps);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const int i = group * PER_SCALE + lane;
      if (i < n) x[group] *= weight ? scale * weight[i] : scale;
    }
  }
};

// Rotates 2 * n_pairs values of a head, starting at number `first`; `row` is shared memory of this warp.
DEVICE void rotate(float (&x)[GROUPS], float* row, const float2* turns, int n_pairs, int first, int interleaved) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int i = group * PER_SCALE + lane;
    if (i < HEAD) row[i] = x[group];
  }
  __syncwarp();
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int i = group * PER_SCALE + lane - first;
    if (i < 0 || 2 * n_pairs <= i) continue;
    const bool is_first = interleaved ? i % 2 == 0 : i < n_pairs;
    const float2 by = turns[interleaved ? i / 2 : is_first ? i : i - n_pairs];
    const float other = row[first + (interleaved ? i ^ 1 : is_first ? i + n_pairs : i - n_pairs)];
    x[group] = is_first ? x[group] * by.x - other * by.y : x[group] * by.x + other * by.y;
  }
}

// Normalises each head of q, k and v, rotates the heads of q and k in place, and appends k and v to the cache of a
// layer.
//
// Grid: (blocks of HEADS_PER_BLOCK heads, for all heads of q, and of k and v if given; tokens).  One warp per head.
// slots: int32 [T], page * PAGE + position in the page.  positions: int32 [T].
// phases: uint64 [n_pairs], turns per position in units of 2^-64; values before `first` and from first + 2 * n_pairs on
// are not rotated.  Pairs are neighbours if `interleaved`, else n_pairs apart.  With AXES, the angle uses the token's
// position on an axis, `axes` int32 [4, axes_stride]; the axis of each pair, int32 [n_pairs], follows the phases.
// `POSITION_OFFSET` is added to positions.
// q, k: float32 [T, heads * KEY_DIM]; v: float32 [T, heads * VALUE_DIM], which may be k; strides in values.
// norm_last: whether norms follow the rotation.  Queries at position p are multiplied by max(1, base +
// rate * log(1 + floor(max(p + offset, 0) / length))), if the rate is not 0.
// keys, values, key_scales, value_scales: of the layer.
extern "C" __global__ void __launch_bounds__(WARP * HEADS_PER_BLOCK)
    rope_append(const int* __restrict__ header, const int* __restrict__ slots, const int* __restrict__ positions,
                const int* __restrict__ axes, int axes_stride, const uint64_t* __restrict__ phases, int n_pairs,
                int first, int interleaved, float magnitude, float* q,
                int q_stride, const float* __restrict__ k, int k_stride, const float* __restrict__ v, int v_stride,
                int n_heads, int n_kv_heads, const float* __restrict__ q_weight, int n_q_norm, float q_eps,
                const float* __restrict__ k_weight, int n_k_norm, float k_eps, const float* __restrict__ v_weight,
                int n_v_norm, float v_eps, int norm_last, float rate, int length, int offset, float base,
                uint8_t* keys, uint16_t* key_scales, uint8_t* values, uint16_t* value_scales) {
  __shared__ float2 turns[HEAD / 2];
  __shared__ float heads[HEADS_PER_BLOCK][HEAD];
  const int token = blockIdx.y, lane = threadIdx.x % WARP;
  if (token >= header[N_TOKENS]) return;
  const int position = positions[token], *const axis = (const int*)(phases + n_pairs);
  for (int i = threadIdx.x; i < n_pairs; i += WARP * HEADS_PER_BLOCK)
    turns[i] = turn((AXES ? axes[axis[i] * axes_stride + token] : position) + POSITION_OFFSET, phases[i], magnitude);
  __syncthreads();

  int head = HEADS_PER_BLOCK * blockIdx.x + threadIdx.x / WARP;
  if (head >= n_heads + (k ? n_kv_heads : 0) + (v ? n_kv_heads : 0)) return;
  const bool is_query = head < n_heads, is_value = head >= n_heads + n_kv_heads;
  if (!is_query) head -= is_value ? n_heads + n_kv_heads : n_heads;
  const float* from =
    is_query ? q + (size_t)token * q_stride : is_value ? v + (size_t)token * v_stride : k + (size_t)token * k_stride;
  const int n = is_value ? VALUE_DIM : KEY_DIM;
  from += head * n;

  float x[GROUPS];
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int i = group * PER_SCALE + lane;
    x[group] = i < n ? from[i] : 0.0f;
  }
  const Norm norm = is_value   ? Norm{v_weight, n_v_norm, v_eps}
                    : is_query ? Norm{q_weight, n_q_norm, q_eps}
                               : Norm{k_weight, n_k_norm, k_eps};
  if (!norm_last || is_value) norm.apply(x);
  if (!is_value) {
    rotate(x, heads[threadIdx.x / WARP], turns, n_pairs, first, interleaved);
    if (norm_last) norm.apply(x);
  }

  if (is_value)
    rotate_together<VALUE_ROTATION>(x);
  else
    rotate_together<KEY_ROTATION>(x);

  if (is_query) {
    float* const to = q + (size_t)token * q_stride + head * KEY_DIM;
    const float number = 1.0f + max(position + offset, 0) / length;
    const float factor = rate != 0.0f ? fmaxf(1.0f, base + rate * logf(number)) : 1.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
      if (group * PER_SCALE + lane < KEY_DIM) to[group * PER_SCALE + lane] = x[group] * factor;
    return;
  }
  if (position % STRIDE != STRIDE - 1) return;
  const int slot = slots[token], place = slot % PAGE / STRIDE;
  const size_t block = (size_t)(slot / PAGE) * n_kv_heads + head;
  if (is_value)
    write_head<VALUE_HEAD, VALUE_BITS>(x, values, value_scales, block, place);
  else
    write_head<KEY_HEAD, KEY_BITS>(x, keys, key_scales, block, place);
}

#if VALUE_ROTATION
// Rotates the heads of attention's result back, out: float32 [T, n_heads * VALUE_DIM].  Grid and warps as in
// `rope_append`.
extern "C" __global__ void __launch_bounds__(WARP * HEADS_PER_BLOCK)
    rotate_back(const int* __restrict__ header, int n_heads, float* out, int out_stride) {
  const int token = blockIdx.y, head = HEADS_PER_BLOCK * blockIdx.x + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (token >= header[N_TOKENS] || head >= n_heads) return;
  float* const row = out + (size_t)token * out_stride + head * VALUE_DIM;
  float x[GROUPS];
#pragma unroll
  for (int group = 0; group < GROUPS; group++)
    x[group] = group * PER_SCALE + lane < VALUE_DIM ? row[group * PER_SCALE + lane] : 0.0f;
  rotate_together<VALUE_ROTATION>(x);
#pragma unroll
  for (int group = 0; group < GROUPS; group++)
    if (group * PER_SCALE + lane < VALUE_DIM) row[group * PER_SCALE + lane] = x[group];
}
#endif
