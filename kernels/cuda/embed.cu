// Rows of a packed matrix of FORMAT, decoded with the same bits as by the file's decoder, and scaled.
#include "batch.cuh"
#include "formats.cuh"

// Four values of the codes in a word; the bytes are the values divided by Codes::step, which is a factor of d.
DEVICE float4 decode(uint32_t word, float d, float m, bool has_minimum) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = (float)(int8_t)(word >> 8 * i) * d;
    if (has_minimum) v[i] = __fadd_rn(v[i], m);  // two roundings, as in the file's decoder
  }
  return make_float4(v[0], v[1], v[2], v[3]);
}

// Columns 4 t ... 4 t + 3 and 16 + 4 t ... of block b of a run of 128 columns.
template <class F>
DEVICE void decode_block(float4& low, float4& high, const uint8_t* tile, int run, int b, int t, int row) {
  using C = typename F::Codes;
  const uint8_t* codes = tile + run * run_bytes<F>() + UNIT * row;
  uint32_t q[2] = {0, 0}, rows[3] = {0, 0, 0};
  for (int i = 0; i < C::UNITS; ++i) q[i] = Plain::load4(codes + UNIT_BYTES * (C::UNITS * b + i) + 4 * t);
  for (int i = 0; i < C::ROW_WORDS; ++i) {
    const int word = C::ROW_WORDS * b + i;
    rows[i] = Plain::load4(codes + UNIT_BYTES * (RUN_BLOCKS * C::UNITS + word / 4) + 4 * (word % 4));
  }
  const CodePair pair = C::unpack(q, rows, t);
  const auto scales = F::block(F::run(F::template load<Plain>(tile + F::RUNS * run_bytes<F>(), row), run), b);
  low = decode(pair.low, scales.d[0], scales.m[0], F::MINIMA > 0);
  high = decode(pair.high, scales.d[F::SCALES - 1], scales.m[F::MINIMA == 2], F::MINIMA > 0);
}

// A value of F16, BF16 or F32.
template <class F>
DEVICE float decode_value(const uint8_t* tile, int column, int row) {
  if constexpr (F::Codes::BITS == 32) {
    return ((const float*)(tile + UNIT_BYTES * (column / 4)))[4 * row + column % 4];
  } else {
    const int lane = row % 8 * 4 + column % 8 / 2, word = row / 8 % 2 + column / 8 % 2 * 2;
    const uint8_t* fragment = tile + FRAGMENT_BYTES * (column / 16 * 2 + row / 16);
    return F::to_float(((const uint16_t*)(fragment + UNIT * lane + 4 * word))[column % 2]);
  }
}

DEVICE void store4(float* y, int column, int begin, int end, float4 v, float scale) {
  const float values[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i)
    if (begin <= column + i && column + i < end) y[column + i - begin] = values[i] * scale;
}

template <class F>
DEVICE void embed_row(const uint8_t* tiles, int row, int begin, int end, float scale, float* y) {
  if constexpr (IS_FLOAT<F>) {
    for (int column = begin + threadIdx.x; column < end; column += blockDim.x)
      y[column - begin] = decode_value<F>(tiles + column / RUN * tile_bytes<F>(), column % RUN, row) * scale;
  } else {
    for (int i = begin / BLOCK * 4 + threadIdx.x; i < (end + BLOCK - 1) / BLOCK * 4; i += blockDim.x) {
      const int block = i / 4, t = i % 4, run = block / RUN_BLOCKS;
      float4 low, high;
      decode_block<F>(low, high, tiles + run / F::RUNS * tile_bytes<F>(), run % F::RUNS, block % RUN_BLOCKS, t, row);
      store4(y, BLOCK * block + 4 * t, begin, end, low, scale);
      store4(y, BLOCK * block + 16 + 4 * t, begin, end, high, scale);
    }
  }
}

// y [T, stride]: columns begin ... end - 1 of the rows `ids` of a matrix, times scale.  One block per token.
// An id below 0 is the id that the last batch chose for row ~id.  An id from EMBEDDED_IDS on belongs to a token with a
// separate embedding in `embeddings` [n, embeddings_stride]; without embeddings it uses row 0.
extern "C" __global__ void __launch_bounds__(256)
    embed(const uint8_t* __restrict__ weights, int begin, int end, int n_tiles, const int* __restrict__ ids,
          const int* __restrict__ chosen, const int* __restrict__ n_tokens, float scale,
          const float* __restrict__ embeddings, int embeddings_stride, float* __restrict__ y, int y_stride) {
  using F = FORMAT;
  const int token = blockIdx.x;
  if (token >= *n_tokens) return;
  const int named = ids[token];
  if (is_embedded(named) && embeddings) {
    const float* row = embeddings + (size_t)embedding_number(named) * embeddings_stride;
    for (int column = threadIdx.x; column < end - begin; column += blockDim.x)
      y[(int64_t)token * y_stride + column] = row[column];
    return;
  }
  const int id = is_embedded(named) ? 0 : named < 0 ? chosen[~named] : named;
  embed_row<F>(weights + (int64_t)(id / GROUP) * n_tiles * tile_bytes<F>(), id % GROUP, begin, end, scale,
               y + (int64_t)token * y_stride);
}
