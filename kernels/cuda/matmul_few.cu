// Matrix products for few tokens on tensor cores: 8 to 32 tokens, or any number for F16 and BF16.
//
// As in matvec.cu, a block has a group of 32 rows, and its warps are the chunks of columns.  Codes are loaded directly
// from memory into registers, up to four blocks of 32 columns ahead.  For a block of 32 columns, 8 tokens take 2 tensor
// core instructions and 3 float operations per sum (8 sums per lane); matvec.cu takes 64 dot products.
#include "fragments.cuh"

#ifdef EXPERTS
#define TOKENS 8
#define ROWS 0
#endif

#if __CUDA_ARCH__ >= 800

// The scales of rows g + 8 i; each lane has the scales of the row with its number.
template <class Run>
DEVICE void spread_scales(Run (&runs)[4], const Run& mine, int lane) {
  constexpr int WORDS = sizeof(Run) / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
      ((uint32_t*)&runs[i])[word] = __shfl_sync(FULL_MASK, ((const uint32_t*)&mine)[word], lane / 4 + 8 * i);
}

// acc = the sums over tiles begin ... end of the group at `tiles`.
template <class F, int N>
DEVICE void multiply_chunk(Sums<N>& acc, const uint8_t* tiles, int begin, int end, const uint8_t* units,
                           const float2* x_scales, int n_rows, int lane) {
  // Blocks whose codes are in registers or in flight; fewer if codes or sums need more registers.
  constexpr int AHEAD = F::Codes::ROW_WORDS || N > 1 ? 2 : 4;
  const uint8_t* tile = tiles + begin * tile_bytes<F>();
  units += (int64_t)begin * F::RUNS * (RUN / 16) * UNIT * n_rows;
  x_scales += (int64_t)begin * F::RUNS * RUN_BLOCKS * n_rows;
  BlockWords<F> words[AHEAD];
#pragma unroll
  for (int b = 0; b < AHEAD; ++b) words[b] = BlockWords<F>::template load<FromGlobal>(tile, b, lane);
  typename F::Raw next_scales = F::template load<Streamed>(tile + F::RUNS * run_bytes<F>(), lane);
  for (int i = begin; i < end; ++i) {
    const typename F::Raw scales = next_scales;
    const bool is_last = i + 1 == end;
    if (!is_last)
      next_scales = F::template load<Streamed>(tile + tile_bytes<F>() + F::RUNS * run_bytes<F>(), lane);
#ifdef EXPERTS
#pragma unroll
#else
#pragma unroll N > 1 && __CUDA_ARCH__ < 900 ? 1 : F::RUNS  // otherwise 16 tokens of Q4_K spill registers
#endif
    for (int run = 0; run < F::RUNS; ++run) {
      typename F::Run runs[4];
      spread_scales(runs, F::run(scales, run), lane);
      const uint8_t* codes = tile + run * run_bytes<F>();
      const uint8_t* next = run + 1 < F::RUNS ? codes + run_bytes<F>() : tile + tile_bytes<F>();
#pragma unroll
      for (int b = 0; b < RUN_BLOCKS; ++b) {
        multiply_block<F, N, FromGlobal>(acc, words[b % AHEAD], runs, b, units, x_scales, n_rows, lane);
        if (b + AHEAD < RUN_BLOCKS)
          words[b % AHEAD] = BlockWords<F>::template load<FromGlobal>(codes, b + AHEAD, lane);
        else if (run + 1 < F::RUNS || !is_last)
          words[b % AHEAD] = BlockWords<F>::template load<FromGlobal>(next, b + AHEAD - RUN_BLOCKS, lane);
        units += 2 * UNIT * (int64_t)n_rows;
        x_scales += n_rows;
      }
    }
    tile += tile_bytes<F>();
  }
}

#endif

// The same function for F16 and BF16.
template <class F, int N>
DEVICE void multiply_floats(Sums<N>& acc, const uint8_t* tiles, int begin, int end, const uint8_t* units, int n_rows,
                            int lane) {
  constexpr int AHEAD = 8, STEPS = RUN / 16;
  const uint8_t* fragment = tiles + begin * tile_bytes<F>() + UNIT * lane;
  units += (int64_t)begin * STEPS * 2 * UNIT * n_rows;
  uint4 next[AHEAD][2];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    for (int m = 0; m < 2; ++m) next[i][m] = Streamed::load16(fragment + FRAGMENT_BYTES * (2 * i + m));
  for (int i = begin; i < end; ++i) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      multiply_fragments<F, N, FromGlobal>(acc, next[step % AHEAD], units, n_rows, lane);
      units += 2 * UNIT * (int64_t)n_rows;
      if (step + AHEAD < STEPS || i + 1 < end) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
          next[step % AHEAD][m] = Streamed::load16(fragment + FRAGMENT_BYTES * (2 * (step + AHEAD) + m));
      }
    }
    fragment += tile_bytes<F>();
  }
}

template <class F, int N>
DEVICE void multiply(Sums<N>& acc, const uint8_t* tiles, const uint8_t* units, const void* x_scales, int n_rows,
                     int first_token, int n_tiles) {
  const int lane = threadIdx.x % WARP, chunk = threadIdx.x / WARP, n_chunks = blockDim.x / WARP;
  const int begin = chunk_begin(chunk, n_chunks, n_tiles), end = chunk_begin(chunk + 1, n_chunks, n_tiles);
  units += UNIT * first_token;
  if constexpr (IS_FLOAT<F>)
    multiply_floats<F, N>(acc, tiles, begin, end, units, n_rows, lane);
#if __CUDA_ARCH__ >= 800
  else
    multiply_chunk<F, N>(acc, tiles, begin, end, units, (const float2*)x_scales + first_token, n_rows, lane);
#endif
}

// Adds the chunks' sums in order and stores them in y, 8 tokens at a time.
template <class F, int N>
DEVICE void add_chunks(const Matrix& matrix, int group, const Sums<N>& acc, const float* token_scales, int first_token,
                       int n_tokens) {
  __shared__ float sums[MAX_CHUNKS][8][GROUP];
  const int lane = threadIdx.x % WARP, chunk = threadIdx.x / WARP, n_chunks = blockDim.x / WARP;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (n > 0) __syncthreads();  // the previous tokens have been read
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[chunk][2 * t + i % 2][16 * m + 8 * (i / 2) + g] = acc[m][n][i];
    __syncthreads();
    const int first = first_token + 8 * n;
    for (int token = chunk; token < 8 && first + token < n_tokens; token += n_chunks) {
      float total = 0.0f;
      for (int c = 0; c < n_chunks; ++c) total += sums[c][token][lane];
      if constexpr (IS_SAME<F, F16>) total *= token_scales[first + token];
      store_result(matrix, total, first + token, group * GROUP + lane);
    }
  }
}

// Like `matvec`; n_rows is a multiple of TOKENS, and TOKENS a multiple of 8.
//
// matmul_few_experts: n_tokens is the number of products.  Grid (products, groups of rows of all matrices).
#ifdef EXPERTS
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matmul_few_experts(const void* __restrict__ units, const void* __restrict__ scales, int n_rows,
                       const int* __restrict__ n_tokens, int n_tiles, const int4* __restrict__ products,
                       MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1), MATRIX_PARAMETERS(2))
#else
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matmul_few(const void* __restrict__ units, const void* __restrict__ scales, int n_rows,
               const int* __restrict__ n_tokens, int n_tiles, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1),
               MATRIX_PARAMETERS(2))
#endif
{
  constexpr int N = TOKENS / 8;
  FIND_ROWS  // the first tokens do not wait for the number of tokens
  int group = blockIdx.y;
  const int which = CHOOSE_MATRIX(group);
  const uint8_t* tiles =
      CHOSEN_WEIGHTS(which) + first_tile(matrix, group, CHOSEN_ROWS(which), n_tiles) * tile_bytes<FORMAT>();
  const int laid_out = ROWS ? ROWS : n_rows;
  units = own_units<FORMAT>(units, n_tiles, laid_out);
  scales = own_scales<FORMAT>(scales, n_tiles, laid_out);
  Sums<N> acc = {};
  multiply<FORMAT, N>(acc, tiles, (const uint8_t*)units, scales, laid_out, first, n_tiles);
  add_chunks<FORMAT, N>(CHOSEN_MATRIX(which), group, acc, (const float*)scales, first, stop);
}
