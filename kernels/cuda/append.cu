// What stands between the query, key and value products and attention: RMS norm of each head, rotation, and the cache.
//
// Compiled for HEAD_DIM and Q8_0 (0 or 1), the cache's type; its layout is drawn in cache.py.
//
// Nothing here is large: an 8B llama's token has 48 heads, 24 KiB read, 16 KiB of queries and 4 KiB of cache written,
// 10 ns at an H200's 4.3 TB/s.  With a warp for each head, one token takes as long as a launch and a few dependent
// loads, and 512 tokens (23 MB) about 6 us.
#include "batch.cuh"
#include "common.cuh"

#define HEAD ((HEAD_DIM + 15) / 16 * 16)
#define GROUPS ((HEAD + PER_SCALE - 1) / PER_SCALE)
#define HEADS_PER_BLOCK 4

// As kernels/ops.py has them.
constexpr float LARGEST_HALF = 65504.0f, LARGEST_SCALED = LARGEST_CODE * LARGEST_HALF;

// The nearest of the range; a NaN stays one.
DEVICE float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// The cosine and sine of position * phase / 2^64 turns, exact before they are rounded however far the position is.
DEVICE float2 turn(int position, uint64_t phase, float magnitude) {
  const int64_t turns = (int64_t)((uint64_t)position * phase);  // whole ones are lost, as they should be
  float sine, cosine;
  sincospif((float)turns * 0x1p-63f, &sine, &cosine);
  return make_float2(cosine * magnitude, sine * magnitude);
}

// Writes a head, of which each lane has every 32nd value, to its place in a page.  Lanes beyond HEAD_DIM have zeros.
DEVICE void write_head(const float (&x)[GROUPS], uint8_t* entries, uint16_t* scales, size_t block, int place) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int i = group * PER_SCALE + lane;
#if Q8_0
    int bits = __float_as_int(x[group]) & 0x7FFFFFFF;  // so that a NaN is the largest
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) bits = max(bits, __shfl_xor_sync(FULL_MASK, bits, step));
    const float largest = clamp(__int_as_float(bits), LARGEST_SCALED);
    const float inverse = largest > NEGLIGIBLE ? LARGEST_CODE / largest : 0.0f;  // of a NaN too: it is the scale
    const int code = __float2int_rn(clamp(x[group] * inverse, LARGEST_CODE));
    if (i < HEAD) entries[(block * PAGE + place) * HEAD + i] = (uint8_t)code;
    if (lane == 0) scales[(block * GROUPS + group) * PAGE + place] = float_to_half(largest / LARGEST_CODE);
#else
    const uint16_t half = float_to_half(clamp(x[group], LARGEST_HALF));
    if (i < HEAD) ((uint16_t*)entries)[(block * PAGE + place) * HEAD + i] = half;
#endif
  }
}

// Norms each head of q and k, rotates both, leaves q where it is, and appends k and v to the cache of a layer.
//
// Grid: (blocks for all heads of q, k and v, HEADS_PER_BLOCK each; tokens).  A warp has a head.
// slots: int32 [T], page * PAGE + place in the page.  positions: int32 [T].
// phases: uint64 [n_pairs], turns a position in units of 2^-64; values from 2 * n_pairs on are not rotated.  Pairs are
// neighbours where `interleaved`, else n_pairs apart.  q, k, v: float32 [T, heads * HEAD_DIM], strides in values.
// norms: bit 0: q_norm is given; bit 1: k_norm is; float32 [HEAD_DIM] each.
// keys, values, key_scales, value_scales: of the layer.
extern "C" __global__ void __launch_bounds__(WARP * HEADS_PER_BLOCK)
    rope_append(const int* __restrict__ header, const int* __restrict__ slots, const int* __restrict__ positions,
                const uint64_t* __restrict__ phases, int n_pairs, int interleaved, float magnitude, float* q,
                int q_stride, const float* __restrict__ k, const float* __restrict__ v, int kv_stride, int n_heads,
                int n_kv_heads, const float* __restrict__ q_norm, const float* __restrict__ k_norm, int norms,
                float eps, uint8_t* keys, uint16_t* key_scales, uint8_t* values, uint16_t* value_scales) {
  __shared__ float2 turns[HEAD / 2];
  __shared__ float heads[HEADS_PER_BLOCK][HEAD];
  const int token = blockIdx.y, lane = threadIdx.x % WARP;
  if (token >= header[N_TOKENS]) return;
  for (int i = threadIdx.x; i < n_pairs; i += WARP * HEADS_PER_BLOCK)
    turns[i] = turn(positions[token], phases[i], magnitude);
  __syncthreads();

  int head = HEADS_PER_BLOCK * blockIdx.x + threadIdx.x / WARP;
  if (head >= n_heads + 2 * n_kv_heads) return;
  const bool is_query = head < n_heads, is_value = head >= n_heads + n_kv_heads;
  if (!is_query) head -= is_value ? n_heads + n_kv_heads : n_heads;
  const float* from = is_query ? q + (size_t)token * q_stride : (is_value ? v : k) + (size_t)token * kv_stride;
  from += head * HEAD_DIM;

  float x[GROUPS];
  float squares = 0.0f;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int i = group * PER_SCALE + lane;
    x[group] = i < HEAD_DIM ? from[i] : 0.0f;
    squares = fmaf(x[group], x[group], squares);
  }
  if (!is_value) {
    if (norms & (is_query ? 1 : 2)) {
      const float* weight = is_query ? q_norm : k_norm;
      const float scale = 1.0f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        const int i = group * PER_SCALE + lane;
        if (i < HEAD_DIM) x[group] *= scale * weight[i];
      }
    }
    float* const row = heads[threadIdx.x / WARP];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const int i = group * PER_SCALE + lane;
      if (i < HEAD) row[i] = x[group];
    }
    __syncwarp();
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const int i = group * PER_SCALE + lane;
      if (i >= 2 * n_pairs) continue;
      const bool is_first = interleaved ? i % 2 == 0 : i < n_pairs;
      const float2 by = turns[interleaved ? i / 2 : is_first ? i : i - n_pairs];
      const float other = row[interleaved ? i ^ 1 : is_first ? i + n_pairs : i - n_pairs];
      x[group] = is_first ? x[group] * by.x - other * by.y : x[group] * by.x + other * by.y;
    }
  }

  if (is_query) {
    float* const to = q + (size_t)token * q_stride + head * HEAD_DIM;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
      if (group * PER_SCALE + lane < HEAD_DIM) to[group * PER_SCALE + lane] = x[group];
    return;
  }
  const int slot = slots[token];
  const size_t block = (size_t)(slot / PAGE) * n_kv_heads + head;
  write_head(x, is_value ? values : keys, is_value ? value_scales : key_scales, block, slot % PAGE);
}

// Copies a page of one part of the cache (cache.py), in all layers.  Grid: (any number, layers).
extern "C" __global__ void __launch_bounds__(256)
    copy_page(uint4* __restrict__ part, int page_bytes, int64_t layer_bytes, int source, int target) {
  uint4* const layer = part + layer_bytes / 16 * blockIdx.y;
  const int n = page_bytes / 16;
  for (int i = 256 * blockIdx.x + threadIdx.x; i < n; i += 256 * gridDim.x)
    layer[(int64_t)target * n + i] = layer[(int64_t)source * n + i];
}
