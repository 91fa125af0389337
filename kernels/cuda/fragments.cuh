// Products of a group of 32 rows and 8 N tokens on tensor cores, 128 columns at a time.  Codes, unpacked in registers,
// are the A operands; activations are the B operands.
#pragma once
#include "dots.cuh"
#include "mma.cuh"

// Work of a block: multiplies rows first ... stop - 1 with matrix number `matrix`.  With EXPERTS, this is one of the
// products: expert, first row (a multiple of 8), and end row; the weights of all experts are contiguous, and rows are
// indexed by place (experts.cu).  Otherwise it is TOKENS tokens, with the matrix of the head.
#ifdef EXPERTS
#define FIND_ROWS                      \
  if (blockIdx.x >= *n_tokens) return; \
  const int matrix = products[blockIdx.x].x, first = products[blockIdx.x].y, stop = products[blockIdx.x].z;
#else
#define FIND_ROWS                                                           \
  const int matrix = head(), first = blockIdx.x * TOKENS, stop = *n_tokens; \
  if (first > 0 && first >= stop) return;
#endif

// Addresses of operands; `Memory` defines how single values are read.
//
// Of a unit of weights (32 rows of 16 bytes), lane 4 g + t loads word t of rows g, g + 8, g + 16 and g + 24.  Of two
// units of 8 tokens, n_rows * 16 bytes each, it loads word t of token g.
struct FromGlobal {
  using Memory = Streamed;
  DEVICE void load_rows(uint32_t (&words)[4], const uint8_t* unit, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Memory::load4(unit + 8 * UNIT * i + 4 * lane);
  }
  DEVICE void load_tokens(uint32_t (&words)[2], const uint8_t* units, int n_rows, int lane) {
    words[0] = *(const uint32_t*)(units + 4 * lane);
    words[1] = *(const uint32_t*)(units + UNIT * (int64_t)n_rows + 4 * lane);
  }
};

#if __CUDA_ARCH__ >= 800
struct FromShared {
  using Memory = Plain;
  DEVICE void load_rows(uint32_t (&words)[4], const uint8_t* unit, int lane) {
    load_matrices(words, unit + UNIT * lane);
  }
  DEVICE void load_tokens(uint32_t (&words)[2], const uint8_t* units, int n_rows, int lane) {
    load_matrices(words, units + UNIT * (n_rows * (lane / 8 % 2) + lane % 8));
  }
};
#endif

// A lane's part of a group's codes in a block of 32 columns.
template <class F>
struct BlockWords {
  using C = typename F::Codes;
  static constexpr int UNITS = C::UNITS ? C::UNITS : 1, ROW_WORDS = C::ROW_WORDS ? C::ROW_WORDS : 1;
  uint32_t units[UNITS][4];
  uint32_t rows[4][ROW_WORDS];

  // run: the codes of 128 columns; b: number of the block.
  template <class Source>
  DEVICE BlockWords load(const uint8_t* run, int b, int lane) {
    BlockWords words;
#pragma unroll
    for (int i = 0; i < C::UNITS; ++i) Source::load_rows(words.units[i], run + UNIT_BYTES * (C::UNITS * b + i), lane);
#pragma unroll
    for (int i = 0; i < C::ROW_WORDS; ++i) {
      const int word = C::ROW_WORDS * b + i;
      const uint8_t* unit = run + UNIT_BYTES * (RUN_BLOCKS * C::UNITS + word / 4) + UNIT * (lane / 4) + 4 * (word % 4);
#pragma unroll
      for (int row = 0; row < 4; ++row) words.rows[row][i] = Source::Memory::load4(unit + 8 * UNIT * row);
    }
    return words;
  }

  // Codes of row g + 8 i.
  __device__ __forceinline__ CodePair pair(int i, int lane) const {
    uint32_t q[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) q[u] = units[u % UNITS][i];
    return C::unpack(q, rows[i], lane % 4);
  }
};

// The scales of rows g + 8 i in 128 columns.
template <class F, class Source>
DEVICE void load_scales(typename F::Run (&runs)[4], const uint8_t* scales, int run, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) runs[i] = F::run(F::template load<typename Source::Memory>(scales, 8 * i + lane / 4), run);
}

// The sums of rows g + 16 m and g + 16 m + 8 with tokens 8 n + 2 t and 8 n + 2 t + 1, in the layout of `mma`.
template <int N>
using Sums = float[2][N][4];

#if __CUDA_ARCH__ >= 800

// Element i of an accumulator.
DEVICE int element(const int4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// acc += a block of 32 columns.  units, x_scales: of the block at the first token; n_rows of each.
template <class F, int N, class Source>
DEVICE void multiply_block(Sums<N>& acc, const BlockWords<F>& words, const typename F::Run (&runs)[4], int b,
                           const uint8_t* units, const float2* x_scales, int n_rows, int lane) {
  CodePair w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = words.pair(i, lane);
  BlockScales<F::SCALES, F::MINIMA> scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i] = F::block(runs[i], b);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    uint32_t x[2];
    Source::load_tokens(x, units + 8 * UNIT * n, n_rows, lane);
    // The scales of tokens 2 t and 2 t + 1.
    const float4 d = *(const float4*)(x_scales + 8 * n + lane % 4 * 2);
    int4 ones[2];
    if constexpr (F::MINIMA == 2) {  // rows of ones, which are all equal, give the sums of the tokens' codes
#pragma unroll
      for (int half = 0; half < 2; ++half) ones[half] = mma_k16(0x01010101, 0x01010101, x[half], MAGIC);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      int4 sums[F::SCALES];
      if constexpr (F::SCALES == 1) {
        const uint32_t a[4] = {w[2 * m].low, w[2 * m + 1].low, w[2 * m].high, w[2 * m + 1].high};
        sums[0] = mma_k32(a, x[0], x[1], MAGIC);
      } else {
        sums[0] = mma_k16(w[2 * m].low, w[2 * m + 1].low, x[0], MAGIC);
        sums[1] = mma_k16(w[2 * m].high, w[2 * m + 1].high, x[1], MAGIC);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int dots[F::SCALES];
        float half_sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < F::SCALES; ++half) dots[half] = element(sums[half], i);
        if constexpr (F::MINIMA == 2) {
#pragma unroll
          for (int half = 0; half < 2; ++half) half_sums[half] = magic_to_float(element(ones[half], i % 2));
        }
        const float x_scale = i % 2 ? d.z : d.x, x_sum = i % 2 ? d.w : d.y;
        acc[m][n][i] = add_block<(N > 2)>(acc[m][n][i], scales[2 * m + i / 2], dots, x_scale, x_sum, half_sums);
      }
    }
  }
}

#endif

template <class F>
DEVICE void mma_floats(float (&acc)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (IS_SAME<F, F16>) mma_f16(acc, a, b0, b1);
#if __CUDA_ARCH__ >= 800
  if constexpr (IS_SAME<F, BF16>) mma_bf16(acc, a, b0, b1);
#endif
}

// acc += 16 columns of F16 or BF16 with the two fragments a.
template <class F, int N, class Source>
DEVICE void multiply_fragments(Sums<N>& acc, const uint4 (&a)[2], const uint8_t* units, int n_rows, int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    uint32_t x[2];
    Source::load_tokens(x, units + 8 * UNIT * n, n_rows, lane);
    mma_floats<F>(acc[0][n], a[0], x[0], x[1]);
    mma_floats<F>(acc[1][n], a[1], x[0], x[1]);
  }
}
