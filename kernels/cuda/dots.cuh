// The order of additions, which is the same for all kernels, so that a token has the same bits in every batch.
//
// The columns are divided into *chunks* of whole tiles.  Matrices of one width have the same number of chunks
// (`n_chunks` in matmul.py).  Within a chunk, blocks of 32 columns are added in order, by `add_block`; then the sums of
// the chunks are added in order, starting from zero.  The integer products of a block are summed exactly, in any order.
#pragma once
#include "activations.cuh"

// A sum of integers that starts at MAGIC is, read as the bits of a float, 3 * 2^22 plus the sum, so it needs no
// conversion.  It must stay below 2^22; a block's sum is at most 32 * 128 * 127.
constexpr int MAGIC = 0x4b400000;
constexpr float MAGIC_FLOAT = 12582912.0f;

DEVICE float magic_to_float(int sum) { return __int_as_float(sum) - MAGIC_FLOAT; }

// A sum that starts at MAGIC, times a scale.  FOLDED: in one operation plus one per scale, with the same bits, because
// scales have at most 19 bits and MAGIC times a scale is exact.  This needs one register per scale.
template <bool FOLDED>
DEVICE float scaled(int sum, float d) {
  return FOLDED ? fmaf(__int_as_float(sum), d, -MAGIC_FLOAT * d) : magic_to_float(sum) * d;
}

// acc += products of a block of a row and a token.
//
// dots: the products of the codes, added to MAGIC, of the whole block or of each 16 columns.  d, d_sum: the scales of
// the activations.  half_sums: the sums of the activations' codes in each 16 columns, for formats with two minima per
// block.
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

// The first tile of chunk i of n_chunks.
DEVICE int chunk_begin(int i, int n_chunks, int n_tiles) { return (int)((int64_t)i * n_tiles / n_chunks); }

// With HEADS, a launch multiplies each head of the activations with a separate matrix: the grid's z is the head.  The
// matrices, the activations and the results of heads are contiguous.
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

// One of the matrices that a launch multiplies with the same activations.
struct Matrix {
  const uint8_t* weights;
  const float* bias;      // [n_out], or null
  const float* residual;  // [T, stride], or null; may be y
  float* y;               // [T, stride]
  int n_out, stride;
};

DEVICE int n_groups(int n_out) { return (int)((uint32_t)(n_out + GROUP - 1) / GROUP); }

// The first tile of a group in the matrix of a head or an expert; these matrices are contiguous.
DEVICE int64_t first_tile(int matrix, int group, int n_out, int n_tiles) {
  return (int64_t)(matrix * n_groups(n_out) + group) * n_tiles;
}

// Up to three matrices as parameters of a kernel; unused ones have n_out 0.
#define MATRIX_PARAMETERS(i)                                                                                     \
  const uint8_t *__restrict__ weights##i, const float *__restrict__ bias##i, const float *residual##i, float *y##i, \
      int n_out##i, int stride##i
#define MATRIX(i) \
  Matrix { weights##i, bias##i, residual##i, y##i + head() * (stride##i / (int)gridDim.z), n_out##i, stride##i }

// The matrix that contains this group of rows; `group` becomes its number in the matrix.  Repeating the choice before
// results are stored is cheaper than keeping a whole Matrix in registers.
#define CHOOSE_MATRIX(group) choose_matrix(n_out0, n_out1, group)
#define CHOSEN_ROWS(which) (which == 0 ? n_out0 : which == 1 ? n_out1 : n_out2)
#define CHOSEN_WEIGHTS(which) (which == 0 ? weights0 : which == 1 ? weights1 : weights2)
#define CHOSEN_MATRIX(which) (which == 0 ? MATRIX(0) : which == 1 ? MATRIX(1) : MATRIX(2))

// PARTS: number of groups that are counted as one.
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
