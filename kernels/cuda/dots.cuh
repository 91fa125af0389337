// The order of additions, which is one for all kernels, so that a token has the same bits in every batch.
//
// The columns are cut into *chunks* of whole tiles, as many for all matrices of one width (matmul.py: `n_chunks`).
// Within a chunk, blocks of 32 columns are added one after the other, as `add_block` says; then the chunks' sums, to
// zero, first to last.  The integer products of a block are summed exactly, in whatever order.
#pragma once
#include "activations.cuh"

// A sum of integers that begins at MAGIC is, as the bits of a float, 3 * 2^22 and the sum, which so takes no
// conversion.  It must stay below 2^22; a block's is at most 32 * 128 * 127.
constexpr int MAGIC = 0x4b400000;
constexpr float MAGIC_FLOAT = 12582912.0f;

DEVICE float magic_to_float(int sum) { return __int_as_float(sum) - MAGIC_FLOAT; }

// A sum that begins at MAGIC, times a scale.  FOLDED: in one operation beside the scale's own, with the same bits, since
// scales have 19 bits at most and MAGIC times one is exact.  It takes a register a scale.
template <bool FOLDED>
DEVICE float scaled(int sum, float d) {
  return FOLDED ? fmaf(__int_as_float(sum), d, -MAGIC_FLOAT * d) : magic_to_float(sum) * d;
}

// acc += a block of a row times a token's.
//
// dots: the codes' products from MAGIC on, of the whole block or of each 16 columns.  d, d_sum: the activations' scales.
// half_sums: the sums of the activations' codes in each 16 columns, where a format has a minimum for each.
template <bool FOLDED, int SCALES, int MINIMA>
DEVICE float add_block(float acc, const BlockScales<SCALES, MINIMA>& w, const int (&dots)[SCALES], float d, float d_sum,
                       const float (&half_sums)[2]) {
  float total = scaled<FOLDED>(dots[0], w.d[0]);
  if constexpr (SCALES == 2) total = fmaf(magic_to_float(dots[1]), w.d[1], total);
  acc = fmaf(total, d, acc);
  if constexpr (MINIMA == 1) acc = fmaf(w.m[0], d_sum, acc);
  if constexpr (MINIMA == 2) acc = fmaf(fmaf(half_sums[1], w.m[1], half_sums[0] * w.m[0]), d, acc);
  return acc;
}

constexpr int MAX_CHUNKS = 16;

// Chunk i of n_chunks begins at this tile.
DEVICE int chunk_begin(int i, int n_chunks, int n_tiles) { return (int)((int64_t)i * n_tiles / n_chunks); }

// With HEADS, a launch multiplies each head of the activations with a matrix of its own: the grid's z is heads, whose
// matrices, activations and parts of y lie one after the other.
#ifndef HEADS
#define HEADS 0
#endif

DEVICE int head() { return HEADS ? blockIdx.z : 0; }

template <class F>
DEVICE const uint8_t* own_units(const void* units, int n_tiles, int n_rows) {
  return (const uint8_t*)units + UNIT * head() * head_units<F>(n_tiles * F::RUNS, n_rows);
}

template <class F>
DEVICE const float* own_scales(const void* scales, int n_tiles, int n_rows) {
  return (const float*)scales + head() * head_scales<F>(n_tiles * F::RUNS, n_rows);
}

// One matrix of those that a launch multiplies with the same activations.
struct Matrix {
  const uint8_t* weights;
  const float* bias;      // [n_out], or null
  const float* residual;  // [T, stride], or null; may be y
  float* y;               // [T, stride]
  int n_out, stride;
};

DEVICE int n_groups(int n_out) { return (int)((uint32_t)(n_out + GROUP - 1) / GROUP); }

// The first tile of a group of a head's or an expert's matrix; all of them lie one after the other.
DEVICE int64_t first_tile(int matrix, int group, int n_out, int n_tiles) {
  return (int64_t)(matrix * n_groups(n_out) + group) * n_tiles;
}

// Up to three matrices, of which those that are not there have n_out 0, as parameters of a kernel.
#define MATRIX_PARAMETERS(i)                                                                                     \
  const uint8_t *__restrict__ weights##i, const float *__restrict__ bias##i, const float *residual##i, float *y##i, \
      int n_out##i, int stride##i
#define MATRIX(i) \
  Matrix { weights##i, bias##i, residual##i, y##i + head() * (stride##i / (int)gridDim.z), n_out##i, stride##i }

// Which of the matrices has this group of rows among those of all; the group becomes its number in that one.  To be
// chosen once more where results are stored costs less than registers that hold a whole Matrix until then.
#define CHOOSE_MATRIX(group) choose_matrix(n_out0, n_out1, group)
#define CHOSEN_ROWS(which) (which == 0 ? n_out0 : which == 1 ? n_out1 : n_out2)
#define CHOSEN_WEIGHTS(which) (which == 0 ? weights0 : which == 1 ? weights1 : weights2)
#define CHOSEN_MATRIX(which) (which == 0 ? MATRIX(0) : which == 1 ? MATRIX(1) : MATRIX(2))

// PARTS: groups that are counted as one.
template <int PARTS = 1>
DEVICE int choose_matrix(int n_out0, int n_out1, int& group) {
  const int n0 = (n_groups(n_out0) + PARTS - 1) / PARTS, n1 = (n_groups(n_out1) + PARTS - 1) / PARTS;
  if (group < n0) return 0;
  group -= n0;
  if (group < n1) return 1;
  group -= n1;
  return 2;
}

// y = total (+ bias) (+ residual).
DEVICE void store_result(const Matrix& matrix, float total, int token, int row) {
  if (row >= matrix.n_out) return;
  const int64_t place = (int64_t)token * matrix.stride + row;
  if (matrix.bias) total += matrix.bias[row];
  if (matrix.residual) total += matrix.residual[place];
  matrix.y[place] = total;
}
