// Matrix products for many tokens, on tensor cores (sm_80 and later).
//
// A block computes 4 groups of 32 rows and TOKENS tokens, with 8 warps of one group and half of the tokens each.  It
// iterates over the columns in runs of 128, which cp.async copies to shared memory STAGES - 1 runs ahead: weights in
// the layout of their tiles, and activations in the layout of their units.  Sums have the same order as in matvec.cu:
// within a chunk in `acc`, and over the chunks in `totals`.
//
// For 32 columns, 32 rows and 8 tokens a warp takes 2 tensor core instructions of 16 * 8 * 32 products each, and 16
// float operations (24 with minima, 32 with two scales); in total, with tiles of 128 tokens, about 46 instructions for
// Q4_K.  Schedulers start one instruction per clock, which limits this kernel to about 330 of the 1979 T operations/s
// of int8 on an H200.
#include "fragments.cuh"

#if __CUDA_ARCH__ >= 800

constexpr int ROW_WARPS = 4, TOKEN_WARPS = 2, THREADS = ROW_WARPS * TOKEN_WARPS * WARP;

// The parts of a stage, in bytes: codes of a run and scales of its tile, for each group, and then the activations.
template <class F, int T>
struct Stage {
  static constexpr int UNITS = IS_FLOAT<F> ? RUN / 8 : RUN / 16;  // of activations
  static constexpr int GROUP_BYTES = run_bytes<F>() + scale_bytes<F>();
  static constexpr int X = ROW_WARPS * GROUP_BYTES;
  static constexpr int X_SCALES = X + UNITS * T * UNIT;
  static constexpr int BYTES = X_SCALES + (IS_FLOAT<F> ? 0 : RUN_BLOCKS * T * (int)sizeof(float2));
};

// Inputs of a block.
struct Sources {
  const uint8_t* weights;
  const uint8_t* units;
  const float2* scales;
  int n_rows, first_token, n_tokens;
  int first_group, n_groups, n_tiles;
};

// Copies of a thread for each run: pieces of 16 bytes, at addresses that advance with the run.
template <class F, int T>
struct Copies {
  using S = Stage<F, T>;
  static constexpr int PIECES = S::GROUP_BYTES / UNIT, CODE_PIECES = run_bytes<F>() / UNIT;
  static constexpr int N_WEIGHTS = ROW_WARPS * PIECES, N_UNITS = S::UNITS * T;
  static constexpr int N_SCALES = IS_FLOAT<F> ? 0 : RUN_BLOCKS * T / 2;  // for two tokens
  static constexpr int OWN = (N_WEIGHTS + THREADS - 1) / THREADS;
  const uint8_t *weights, *units, *scales;
  uint32_t places[OWN], steps[OWN];  // of weights; steps between runs of a tile
  int n_rows, run;

  // Groups and tokens after the last one repeat it.
  __device__ __forceinline__ explicit Copies(const Sources& from) : n_rows(from.n_rows), run(0) {
    const int thread = threadIdx.x, last = from.n_tokens - 1;
    weights = from.weights + (int64_t)from.first_group * from.n_tiles * tile_bytes<F>();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int p = thread + THREADS * i, piece = p % PIECES;
      const int group = min(p / PIECES, from.n_groups - 1 - from.first_group);
      const bool is_code = piece < CODE_PIECES;  // scales follow the codes of all runs
      places[i] = group * from.n_tiles * tile_bytes<F>() + (is_code ? 0 : runs<F>() - 1) * run_bytes<F>() + UNIT * piece;
      steps[i] = is_code ? run_bytes<F>() : 0;
    }
    units = from.units + ((int64_t)(thread / T) * n_rows + min(from.first_token + thread % T, last)) * UNIT;
    const int token = min(from.first_token + thread % (T / 2) * 2, last & ~1);
    scales = (const uint8_t*)(from.scales + (int64_t)(thread / (T / 2)) * n_rows + token);
  }

  __device__ __forceinline__ void next(uint8_t* stage) {
    const int thread = threadIdx.x;
    stage += UNIT * thread;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (thread + THREADS * i < N_WEIGHTS) copy16_async(stage + UNIT * THREADS * i, weights + places[i]);
      places[i] += run + 1 == runs<F>() ? tile_bytes<F>() - (runs<F>() - 1) * steps[i] : steps[i];
    }
    run = run + 1 == runs<F>() ? 0 : run + 1;
#pragma unroll
    for (int i = 0; THREADS * i < N_UNITS; ++i)
      if (thread + THREADS * i < N_UNITS)
        copy16_async(stage + S::X + UNIT * THREADS * i, units + (int64_t)n_rows * (THREADS / T * UNIT * i));
    units += (int64_t)n_rows * (S::UNITS * UNIT);
#pragma unroll
    for (int i = 0; THREADS * i < N_SCALES; ++i)
      if (thread + THREADS * i < N_SCALES)
        copy16_async(stage + S::X_SCALES + UNIT * THREADS * i, scales + (int64_t)n_rows * (THREADS / T * 2 * 8 * i));
    scales += (int64_t)n_rows * (RUN_BLOCKS * 8);
  }
};

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
#pragma unroll 1  // unrolling all four would spill registers
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
DEVICE void multiply(Sums<T / 8 / TOKEN_WARPS>& totals, const Sources& from, int n_chunks) {
  constexpr int N = T / 8 / TOKEN_WARPS;
  extern __shared__ __align__(16) uint8_t stages[];
  const int n_runs = from.n_tiles * runs<F>();
  Copies<F, T> copies(from);
#pragma unroll 1
  for (int i = 0; i < N_STAGES - 1; ++i) {
    if (i < n_runs) copies.next(stages + Stage<F, T>::BYTES * i);
    commit_copies();
  }
  Sums<N> acc = {};
  int chunk = 1, chunk_end = chunk_begin(1, n_chunks, from.n_tiles) * runs<F>();
  int here = 0, ahead = N_STAGES - 1;  // stages
  for (int i = 0; i < n_runs; ++i) {
    wait_for_copies<N_STAGES - 2>();
    __syncthreads();  // the run has arrived for all warps, and all have read the previous run
    if (i + N_STAGES - 1 < n_runs) copies.next(stages + Stage<F, T>::BYTES * ahead);
    commit_copies();
    multiply_run<F, T>(acc, stages + Stage<F, T>::BYTES * here, i % runs<F>());
    here = here + 1 == N_STAGES ? 0 : here + 1;
    ahead = ahead + 1 == N_STAGES ? 0 : ahead + 1;
    if (i + 1 == chunk_end) {
      add_and_clear<N>(totals, acc);
      chunk_end = chunk_begin(++chunk, n_chunks, from.n_tiles) * runs<F>();
    }
  }
}

template <class F, int N>
DEVICE void store(const Matrix& matrix, const Sums<N>& totals, const Sources& from) {
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

// y = x W^T (+ bias) (+ residual), for up to three matrices.
//
// units, scales: activations (activations.cuh), laid out for n_rows (a multiple of 8), of which n_tokens are used.
// n_tiles: tiles along a row of weights, in n_chunks chunks.  Grid (TOKENS tokens each, 4 groups of rows of a matrix
// each, heads); dynamic shared memory: STAGES stages.
//
// matmul_experts: n_tokens is the number of products, of at most TOKENS rows.  Grid (products, 4 groups of rows each).
#ifdef EXPERTS
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_experts(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                   const int* __restrict__ n_tokens, int n_tiles, int n_chunks, const int4* __restrict__ products,
                   MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1), MATRIX_PARAMETERS(2))
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
           const int* __restrict__ n_tokens, int n_tiles, int n_chunks, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1),
           MATRIX_PARAMETERS(2))
#endif
{
  FIND_ROWS
  if (first >= stop) return;
  int block = blockIdx.y;
  const int which = choose_matrix<ROW_WARPS>(n_out0, n_out1, block), n_out = CHOSEN_ROWS(which);
  const Sources from = {CHOSEN_WEIGHTS(which) + first_tile(matrix, 0, n_out, n_tiles) * tile_bytes<FORMAT>(),
                        own_units<FORMAT>(units, n_tiles, n_rows),
                        (const float2*)own_scales<FORMAT>(scales, n_tiles, n_rows),
                        n_rows,
                        first,
                        stop,
                        block * ROW_WARPS,
                        n_groups(n_out),
                        n_tiles};
  Sums<TOKENS / 8 / TOKEN_WARPS> totals = {};
  multiply<FORMAT, TOKENS, STAGES>(totals, from, n_chunks);
  block = blockIdx.y;
  const int again = choose_matrix<ROW_WARPS>(n_out0, n_out1, block);
  store<FORMAT, TOKENS / 8 / TOKEN_WARPS>(CHOSEN_MATRIX(again), totals, from);
}

#endif
