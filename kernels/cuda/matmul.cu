// Matrix products for many tokens, on tensor cores (sm_80 and later).
//
// A block has 4 groups of 32 rows and TOKENS tokens: 8 warps, each with one group and half of the tokens.  It goes
// through the columns in runs of 128, which cp.async brings to shared memory STAGES - 1 runs ahead, weights as they lie
// in their tiles and activations as they lie in their units.  Sums are those of matvec.cu, in the same order: within a
// chunk in `acc`, and over the chunks in `totals`.
//
// For 32 columns, 32 rows and 8 tokens a warp takes 2 instructions of the tensor cores, of 16 * 8 * 32 products each, and
// 24 operations on floats (32 with minima, 40 with two scales), which at one instruction a cycle take longer than the
// tensor cores: they bound this kernel to some 500 of the 1979 T operations/s that an H200 has for int8.
#include "fragments.cuh"

#if __CUDA_ARCH__ >= 800

constexpr int ROW_WARPS = 4, TOKEN_WARPS = 2, THREADS = ROW_WARPS * TOKEN_WARPS * WARP;

// The parts of a stage, in bytes: of each group the codes of a run and the scales of its tile, then the activations.
template <class F, int T>
struct Stage {
  static constexpr int UNITS = IS_FLOAT<F> ? RUN / 8 : RUN / 16;  // of activations
  static constexpr int GROUP_BYTES = run_bytes<F>() + scale_bytes<F>();
  static constexpr int X = ROW_WARPS * GROUP_BYTES;
  static constexpr int X_SCALES = X + UNITS * T * UNIT;
  static constexpr int BYTES = X_SCALES + (IS_FLOAT<F> ? 0 : RUN_BLOCKS * T * (int)sizeof(float2));
};

// What a block reads.
struct Sources {
  const uint8_t* weights;
  const uint8_t* units;
  const float2* scales;
  int n_rows, first_token, n_tokens;
  int first_group, n_groups, n_tiles;
};

// Asks for run i.  Groups and tokens beyond the last are that one again.
template <class F, int T>
DEVICE void copy_run(uint8_t* stage, const Sources& from, int i) {
  using S = Stage<F, T>;
  constexpr int PIECES = S::GROUP_BYTES / UNIT, CODE_PIECES = run_bytes<F>() / UNIT;
  const int tile = i / runs<F>(), run = i % runs<F>();
  for (int p = threadIdx.x; p < ROW_WARPS * PIECES; p += THREADS) {
    const int group = min(from.first_group + p / PIECES, from.n_groups - 1), piece = p % PIECES;
    const int skipped = piece < CODE_PIECES ? run : runs<F>() - 1;  // other runs' codes, before this one's or the scales
    copy16_async(stage + UNIT * p, from.weights + ((int64_t)group * from.n_tiles + tile) * tile_bytes<F>() +
                                       skipped * run_bytes<F>() + UNIT * piece);
  }
  for (int p = threadIdx.x; p < S::UNITS * T; p += THREADS) {
    const int64_t unit = (int64_t)i * S::UNITS + p / T;
    const int token = min(from.first_token + p % T, from.n_tokens - 1);
    copy16_async(stage + S::X + UNIT * p, from.units + (unit * from.n_rows + token) * UNIT);
  }
  if constexpr (!IS_FLOAT<F>) {
    for (int p = threadIdx.x; p < RUN_BLOCKS * T / 2; p += THREADS) {  // of two tokens
      const int64_t block = (int64_t)i * RUN_BLOCKS + p / (T / 2);
      const int token = min(from.first_token + p % (T / 2) * 2, (from.n_tokens - 1) & ~1);
      copy16_async(stage + S::X_SCALES + UNIT * p, from.scales + block * from.n_rows + token);
    }
  }
}

// acc += a run.
template <class F, int T>
DEVICE void multiply_run(Sums<T / 8 / TOKEN_WARPS>& acc, const uint8_t* stage, int run) {
  using S = Stage<F, T>;
  constexpr int N = T / 8 / TOKEN_WARPS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint8_t* codes = stage + S::GROUP_BYTES * (warp % ROW_WARPS);
  const int first_token = 8 * N * (warp / ROW_WARPS);
  const uint8_t* units = stage + S::X + UNIT * first_token;
  if constexpr (IS_FLOAT<F>) {
#pragma unroll
    for (int step = 0; step < RUN / 16; ++step) {
      const uint8_t* fragment = codes + FRAGMENT_BYTES * 2 * step + UNIT * lane;
      const uint4 a[2] = {Plain::load16(fragment), Plain::load16(fragment + FRAGMENT_BYTES)};
      multiply_fragments<F, N, FromShared>(acc, a, units + 2 * UNIT * T * step, T, lane);
    }
  } else {
    const float2* x_scales = (const float2*)(stage + S::X_SCALES) + first_token;
    typename F::Run runs[4];
    load_scales<F, FromShared>(runs, codes + run_bytes<F>(), run, lane);
#pragma unroll 1  // all four at once take more registers than there are
    for (int b = 0; b < RUN_BLOCKS; ++b) {
      const auto words = BlockWords<F>::template load<FromShared>(codes, b, lane);
      multiply_block<F, N, FromShared>(acc, words, runs, b, units + 2 * UNIT * T * b, x_scales + T * b, T, lane);
    }
  }
}

template <int N>
DEVICE void add_and_clear(Sums<N>& totals, Sums<N>& acc) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        totals[m][n][i] += acc[m][n][i];
        acc[m][n][i] = 0.0f;
      }
}

template <class F, int T, int N_STAGES>
DEVICE void multiply(const Matrix& matrix, const Sources& from, int n_chunks) {
  constexpr int N = T / 8 / TOKEN_WARPS;
  extern __shared__ __align__(16) uint8_t stages[];
  const int n_runs = from.n_tiles * runs<F>();
#pragma unroll 1
  for (int i = 0; i < N_STAGES - 1; ++i) {
    if (i < n_runs) copy_run<F, T>(stages + Stage<F, T>::BYTES * i, from, i);
    commit_copies();
  }
  Sums<N> acc = {}, totals = {};
  int chunk = 1, chunk_end = chunk_begin(1, n_chunks, from.n_tiles) * runs<F>();
  int here = 0, ahead = N_STAGES - 1;  // stages
  for (int i = 0; i < n_runs; ++i) {
    wait_for_copies<N_STAGES - 2>();
    __syncthreads();  // the run is there for all warps, and all have read the one before it
    if (i + N_STAGES - 1 < n_runs) copy_run<F, T>(stages + Stage<F, T>::BYTES * ahead, from, i + N_STAGES - 1);
    commit_copies();
    multiply_run<F, T>(acc, stages + Stage<F, T>::BYTES * here, i % runs<F>());
    here = here + 1 == N_STAGES ? 0 : here + 1;
    ahead = ahead + 1 == N_STAGES ? 0 : ahead + 1;
    if (i + 1 == chunk_end) {
      add_and_clear<N>(totals, acc);
      chunk_end = chunk_begin(++chunk, n_chunks, from.n_tiles) * runs<F>();
    }
  }
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int first_row = (from.first_group + warp % ROW_WARPS) * GROUP + lane / 4;
  const int first_token = from.first_token + 8 * N * (warp / ROW_WARPS) + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first_token + 8 * n + i % 2;
        if (token >= from.n_tokens) continue;
        float total = totals[m][n][i];
        if constexpr (IS_SAME<F, F16>) total *= ((const float*)from.scales)[token];
        store_result(matrix, total, token, first_row + 16 * m + 8 * (i / 2));
      }
}

#ifndef EXPERTS

// y = x W^T (+ bias) (+ residual).
//
// units, scales: activations (activations.cuh), laid out for n_rows, a multiple of 8, of which n_tokens are there.
// n_tiles: tiles along a row of weights, in n_chunks chunks.  Grid (TOKENS tokens each, 4 groups of rows each, heads);
// dynamic shared memory: STAGES stages.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
           const int* __restrict__ n_tokens, int n_tiles, int n_chunks, MATRIX_PARAMETERS(0)) {
  const int first_token = blockIdx.x * TOKENS, n = *n_tokens;
  if (first_token >= n) return;
  const Matrix matrix = MATRIX(0);
  const int groups = n_groups(n_out0);
  const Sources from = {matrix.weights + first_tile(0, n_out0, n_tiles) * tile_bytes<FORMAT>(),
                        own_units<FORMAT>(units, n_tiles, n_rows),
                        (const float2*)own_scales<FORMAT>(scales, n_tiles, n_rows),
                        n_rows,
                        first_token,
                        n,
                        (int)blockIdx.y * ROW_WARPS,
                        groups,
                        n_tiles};
  multiply<FORMAT, TOKENS, STAGES>(matrix, from, n_chunks);
}

#else

// With the matrices of experts: a block has 4 groups of 32 rows, and up to TOKENS tokens of an expert.
//
// y = x W^T, where each row has the matrix W of its expert.
//
// weights: of all experts, one after the other.  products: expert, first row, a multiple of 8, and the one behind the
// last, at most TOKENS.  Grid (products, 4 groups of rows each).  The rest is as above.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_experts(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                   const int* __restrict__ n_products, int n_tiles, int n_chunks, const int4* __restrict__ products,
                   MATRIX_PARAMETERS(0)) {
  if (blockIdx.x >= *n_products) return;
  const int4 product = products[blockIdx.x];
  const int groups = n_groups(n_out0);
  const Matrix matrix = MATRIX(0);
  const uint8_t* weights = weights0 + (int64_t)product.x * groups * n_tiles * tile_bytes<FORMAT>();
  const Sources from = {weights,   (const uint8_t*)units,       scales, n_rows, product.y,
                        product.z, (int)blockIdx.y * ROW_WARPS, groups, n_tiles};
  multiply<FORMAT, TOKENS, STAGES>(matrix, from, n_chunks);
}

#endif
#endif
