// Matrix products for few tokens: each lane computes a row, and lanes are combined only at the end.
//
// A block has a group of 32 rows and up to TOKENS tokens; its warps are the chunks of columns.  A warp has codes of 128
// columns in registers, and while it uses them it loads the next 128 columns: for Q4_0, 1.5 to 2 KB and 256 bytes of
// scales are in flight.  An H200 reads 4.3 TB/s with a latency of some 700 ns, so 23 KB must be in flight for each of
// its 132 multiprocessors; the 16 warps of one block have 30 KB in flight, and two blocks fit.
//
// Activations are the same for all lanes, so a load broadcasts one unit, and the same for all blocks of a
// multiprocessor, so they stay in its first-level cache.  For a block of 32 columns a token takes 8 dot products, 3
// loads and 3 float operations; unpacking takes 12 (Q4_0, Q4_K), 20 (Q5_0), 24 (Q6_K) or 56 (tables) instructions for
// all tokens.
#include "dots.cuh"
#include "gate.cuh"

// Work of a block: rows of activations from `row` on, laid out for `laid_out`, times matrix number `matrix` (of a head
// or an expert), to rows first ... stop - 1 of y.  Blocks of the first tokens do not wait for *n_tokens.
#ifdef EXPERTS
#define TOKENS 1
#define FIND_ROWS                                                                     \
  const int pair = blockIdx.x;                                                        \
  if (pair >= *n_tokens * k) return;                                                  \
  const int first = places[pair], stop = first + 1, matrix = experts[pair], row = first / share, laid_out = n_rows;
#else
#define FIND_ROWS                                                                                         \
  const int first = blockIdx.x * TOKENS, stop = *n_tokens, matrix = head(), row = first, laid_out = ROWS ? ROWS : n_rows; \
  if (first > 0 && first >= stop) return;
#endif

// A row's codes of 128 columns.
template <class F>
struct RunWords {
  using C = typename F::Codes;
  uint4 units[C::BITS];

  __device__ __forceinline__ void load(const uint8_t* run, int unit, int lane) {
    units[unit] = Streamed::load16(run + UNIT_BYTES * unit + UNIT * lane);
  }

  // The last block of 32 columns with codes in this unit.
  static constexpr int last_block(int unit) {
    const int row_unit = unit - RUN_BLOCKS * C::UNITS;
    return row_unit < 0 ? unit / (C::UNITS ? C::UNITS : 1) : (4 * row_unit + 3) / (C::ROW_WORDS ? C::ROW_WORDS : 1);
  }

  __device__ __forceinline__ uint32_t word(int unit, int i) const {
    return i == 0 ? units[unit].x : i == 1 ? units[unit].y : i == 2 ? units[unit].z : units[unit].w;
  }

  // Columns 4 t ... 4 t + 3 and 16 + 4 t ... of block b.
  __device__ __forceinline__ CodePair pair(int b, int t) const {
    uint32_t q[2] = {0, 0}, rows[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < C::UNITS; ++i) q[i] = word(C::UNITS * b + i, t);
#pragma unroll
    for (int i = 0; i < C::ROW_WORDS; ++i) {
      const int place = C::ROW_WORDS * b + i;
      rows[i] = word(RUN_BLOCKS * C::UNITS + place / 4, place % 4);
    }
    return C::unpack(q, rows, t);
  }
};

// The activations of N tokens in the current block.
struct Inputs {
  const int4* units;
  const float2* scales;
  int n_rows;

  // The activations from block `block` of 32 columns on, in units of `columns` columns.
  __device__ __forceinline__ Inputs from(int block, int columns) const {
    return {units + (int64_t)block * (BLOCK / columns) * n_rows, scales + (int64_t)block * n_rows, n_rows};
  }
};

DEVICE int dot4(int4 x, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int sum) {
  sum = __dp4a(x.x, (int)w0, sum);
  sum = __dp4a(x.y, (int)w1, sum);
  sum = __dp4a(x.z, (int)w2, sum);
  return __dp4a(x.w, (int)w3, sum);
}

// acc += a block of 32 columns with codes w; advances x to the next block.
template <class F, int N>
DEVICE void multiply_block(float (&acc)[N], const CodePair (&w)[4], const BlockScales<F::SCALES, F::MINIMA>& scales,
                           Inputs& x) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int4 low = x.units[i], high = x.units[x.n_rows + i];
    const float2 d = x.scales[i];
    const int first = dot4(low, w[0].low, w[1].low, w[2].low, w[3].low, MAGIC);
    const int second = dot4(high, w[0].high, w[1].high, w[2].high, w[3].high, F::SCALES == 2 ? MAGIC : first);
    int dots[F::SCALES];
    float half_sums[2] = {0.0f, 0.0f};
    dots[F::SCALES - 1] = second;
    if constexpr (F::SCALES == 2) dots[0] = first;
    if constexpr (F::MINIMA == 2) {
      constexpr uint32_t ONES = 0x01010101;
      half_sums[0] = magic_to_float(dot4(low, ONES, ONES, ONES, ONES, MAGIC));
      half_sums[1] = magic_to_float(dot4(high, ONES, ONES, ONES, ONES, MAGIC));
    }
    acc[i] = add_block<false>(acc[i], scales, dots, d.x, d.y, half_sums);
  }
  x.units += 2 * x.n_rows;
  x.scales += x.n_rows;
}

// acc += 128 columns.  As soon as a unit's codes are used, the codes of the run at `next` are loaded, if it exists.
template <class F, int N>
DEVICE void multiply_run(float (&acc)[N], RunWords<F>& words, const typename F::Run& scales, Inputs& x,
                         const uint8_t* next, int lane) {
#pragma unroll
  for (int b = 0; b < RUN_BLOCKS; ++b) {
    CodePair w[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) w[t] = words.pair(b, t);
    if (next) {
#pragma unroll
      for (int unit = 0; unit < F::Codes::BITS; ++unit)
        if (RunWords<F>::last_block(unit) == b) words.load(next, unit, lane);
    }
    multiply_block<F, N>(acc, w, F::block(scales, b), x);
  }
}

// acc = the sums over tiles begin ... end of the group at `tiles`.
template <class F, int N>
DEVICE void multiply_chunk(float (&acc)[N], const uint8_t* tiles, int begin, int end, Inputs x, int lane) {
  x = x.from(begin * F::RUNS * RUN_BLOCKS, 16);
  const uint8_t* tile = tiles + begin * tile_bytes<F>();
  RunWords<F> words;
#pragma unroll
  for (int unit = 0; unit < F::Codes::BITS; ++unit) words.load(tile, unit, lane);
  typename F::Raw next_scales = F::template load<Streamed>(tile + F::RUNS * run_bytes<F>(), lane);
  wait_for_last();  // weights do not depend on the previous kernel
  for (int i = begin; i < end; ++i) {
    const typename F::Raw scales = next_scales;
    const uint8_t* next = i + 1 < end ? tile + tile_bytes<F>() : nullptr;
    if (next) next_scales = F::template load<Streamed>(next + F::RUNS * run_bytes<F>(), lane);
#pragma unroll
    for (int run = 0; run < F::RUNS; ++run)
      multiply_run<F, N>(acc, words, F::run(scales, run), x, run + 1 < F::RUNS ? tile + run_bytes<F>() : next, lane);
    tile = next;
  }
}

// The same function for F32, whose units are four columns, in order.
template <int N>
DEVICE void multiply_floats(float (&acc)[N], const uint8_t* tiles, int begin, int end, Inputs x, int lane) {
  x = x.from(begin * RUN_BLOCKS, 4);
  wait_for_last();
  const uint8_t* unit = tiles + begin * tile_bytes<F32>() + UNIT * lane;
#pragma unroll 4
  for (int i = begin * (RUN / 4); i < end * (RUN / 4); ++i) {
    const uint4 w = Streamed::load16(unit);
    unit += UNIT_BYTES;
#pragma unroll
    for (int token = 0; token < N; ++token) {
      const float4 v = ((const float4*)x.units)[token];
      acc[token] = fmaf(__int_as_float(w.x), v.x, acc[token]);
      acc[token] = fmaf(__int_as_float(w.y), v.y, acc[token]);
      acc[token] = fmaf(__int_as_float(w.z), v.z, acc[token]);
      acc[token] = fmaf(__int_as_float(w.w), v.w, acc[token]);
    }
    x.units += x.n_rows;
  }
}

template <int N>
using ChunkSums = float[MAX_CHUNKS][N][GROUP];

template <class F, int N>
DEVICE void multiply_alone(float (&sums)[N][GROUP], const uint8_t* tiles, const Inputs& x, int n_tiles, int chunk,
                           int n_chunks) {
  const int lane = threadIdx.x % WARP;
  const int begin = chunk_begin(chunk, n_chunks, n_tiles), end = chunk_begin(chunk + 1, n_chunks, n_tiles);
  float acc[N] = {};
  if constexpr (IS_FLOAT<F>)
    multiply_floats(acc, tiles, begin, end, x, lane);
  else
    multiply_chunk<F, N>(acc, tiles, begin, end, x, lane);
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i][lane] = acc[i];
}

template <class F, int N>
DEVICE void multiply(ChunkSums<N>& sums, const uint8_t* tiles, const Inputs& x, int n_tiles, int chunk, int n_chunks) {
  multiply_alone<F, N>(sums[chunk], tiles, x, n_tiles, chunk, n_chunks);
  __syncthreads();
}

template <int N>
DEVICE float added_chunks(const float (*sums)[N][GROUP], int n_chunks, int token) {
  float total = 0.0f;
  for (int chunk = 0; chunk < n_chunks; ++chunk) total += sums[chunk][token][threadIdx.x % WARP];
  return total;
}

template <int N>
DEVICE void add_chunks(const Matrix& matrix, int group, const ChunkSums<N>& sums, int first_token, int n_tokens) {
  const int lane = threadIdx.x % WARP, n_chunks = blockDim.x / WARP;
  for (int i = threadIdx.x / WARP; i < N && first_token + i < n_tokens; i += n_chunks)
    store_result(matrix, added_chunks<N>(sums, n_chunks, i), first_token + i, group * GROUP + lane);
}

#ifdef GATED

// activation(x W^T) * (x V^T) as codes, where W and V have n_out rows, a multiple of 128.  The first half of the
// block's warps computes a group of W, the second half the same group of V; grid (TOKENS tokens each, groups of rows).
// `matvec` describes the other parameters.
#ifdef EXPERTS
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec_experts_gated(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                         const int* __restrict__ n_tokens, int n_tiles, int k, int share,
                         const int* __restrict__ experts, const int* __restrict__ places, GATE_PARAMETERS)
#else
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec_gated(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                 const int* __restrict__ n_tokens, int n_tiles, GATE_PARAMETERS)
#endif
{
  __shared__ ChunkSums<TOKENS> sums[2];
  let_next_begin();
  FIND_ROWS
  const int warp = threadIdx.x / WARP, n_chunks = blockDim.x / WARP / 2, half = warp / n_chunks, group = blockIdx.y;
  const Inputs x = {(const int4*)units + row, scales + row, laid_out};
  const int64_t tile = ((int64_t)matrix * gridDim.y + group) * n_tiles;
  multiply<FORMAT, TOKENS>(sums[half], (half ? ups : gates) + tile * tile_bytes<FORMAT>(), x, n_tiles,
                           warp - half * n_chunks, n_chunks);
  for (int i = warp; i < TOKENS && first + i < stop; i += 2 * n_chunks)
    GATE.store(added_chunks<TOKENS>(sums[0], n_chunks, i), added_chunks<TOKENS>(sums[1], n_chunks, i), group, first + i);
}

#elif !defined(SUMMED)

// y = x W^T (+ bias) (+ residual) for up to three matrices W; the last one may have LAST_FORMAT.
//
// units, scales: activations (activations.cuh), laid out for n_rows, a multiple of TOKENS; ROWS is n_rows, or 0.
// n_tokens: number of tokens.  n_tiles: tiles along a row of weights.  One warp per chunk of columns; grid (TOKENS
// tokens each, groups of rows of all matrices, heads): blocks that read the same weights run together.
//
// matvec_experts: the weights of all experts are contiguous, and a block computes one of the n_tokens * k pairs
// (experts.cu) with its expert's weights.  Rows of y are places; `share` places, one or k, use the same row of units
// and scales.
#ifdef EXPERTS
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec_experts(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                   const int* __restrict__ n_tokens, int n_tiles, int k, int share, const int* __restrict__ experts,
                   const int* __restrict__ places, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1), MATRIX_PARAMETERS(2))
#else
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
           const int* __restrict__ n_tokens, int n_tiles, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1),
           MATRIX_PARAMETERS(2))
#endif
{
  __shared__ ChunkSums<TOKENS> sums;
  let_next_begin();
  FIND_ROWS
  const Inputs x = {(const int4*)own_units<FORMAT>(units, n_tiles, laid_out) + row,
                    (const float2*)own_scales<FORMAT>(scales, n_tiles, laid_out) + row, laid_out};
  int group = blockIdx.y;
  const int which = CHOOSE_MATRIX(group), chunk = threadIdx.x / WARP, n_chunks = blockDim.x / WARP;
  const int64_t first_of_group = first_tile(matrix, group, CHOSEN_ROWS(which), n_tiles);
#ifdef LAST_FORMAT
  if (which == (n_out2 ? 2 : 1)) {
    const uint8_t* tiles = CHOSEN_WEIGHTS(which) + first_of_group * tile_bytes<LAST_FORMAT>();
    multiply<LAST_FORMAT, TOKENS>(sums, tiles, x, n_tiles, chunk, n_chunks);
  } else
#endif
    multiply<FORMAT, TOKENS>(sums, CHOSEN_WEIGHTS(which) + first_of_group * tile_bytes<FORMAT>(), x, n_tiles, chunk, n_chunks);
  add_chunks(CHOSEN_MATRIX(which), group, sums, first, stop);
}

#else

constexpr int MAX_SUMMED = 128;

// y = (y +) the sum of a token's k products with one matrix, starting with the best expert; each product plus the bias
// of its expert, times its weight, if not null.  Rows of x are pairs.  biases: `stride` values per row.
//
// Warps process the k * n_chunks chunks, at most MAX_SUMMED, in turn.  Grid (tokens, groups of rows).
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec_experts_summed(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                          const int* __restrict__ n_tokens, int n_tiles, int k, int n_chunks,
                          const int* __restrict__ experts, const float* __restrict__ expert_weights,
                          const uint8_t* __restrict__ weights, const float* __restrict__ biases, float* __restrict__ y,
                          int n_out, int stride, int adds) {
  __shared__ float sums[MAX_SUMMED][1][GROUP];
  const int token = blockIdx.x, row = blockIdx.y * GROUP + threadIdx.x % WARP;
  if (token >= *n_tokens) return;
  for (int i = threadIdx.x / WARP; i < k * n_chunks; i += blockDim.x / WARP) {
    const int pair = token * k + i / n_chunks, chunk = i % n_chunks;
    const Inputs x = {(const int4*)units + pair, scales + pair, n_rows};
    const int64_t first = ((int64_t)experts[pair] * gridDim.y + blockIdx.y) * n_tiles * tile_bytes<FORMAT>();
    multiply_alone<FORMAT, 1>(sums[i], weights + first, x, n_tiles, chunk, n_chunks);
  }
  __syncthreads();
  if (threadIdx.x >= WARP || row >= n_out) return;
  float total = 0.0f;
  for (int pair = token * k, i = 0; i < k; i++, pair++) {
    float product = added_chunks<1>(sums + i * n_chunks, n_chunks, 0);
    if (biases) product += biases[(size_t)experts[pair] * stride + row];
    total = fmaf(product, expert_weights ? expert_weights[pair] : 1.0f, total);
  }
  float* to = y + (size_t)token * stride + row;
  *to = total + (adds ? *to : 0.0f);
}

#endif
