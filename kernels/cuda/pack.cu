// Packs a file's rows to the tiles that the other kernels read.  FORMAT: format of the blocks.
//
// Packing reads the weights once during loading, at most at the speed of the bus.  So codes are copied one by one, with
// simple rules for their positions.
#include "formats.cuh"

// The codes of a block of 32 columns; zeros if there is no such block.
template <class F>
DEVICE void file_codes(uint8_t (&codes)[BLOCK], const uint8_t* row, int column, int n_in) {
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const uint8_t* block = row + (int64_t)(column / F::FILE_COLUMNS) * F::FILE_BYTES;
    codes[i] = row && column < n_in ? F::code(block, column % F::FILE_COLUMNS + i) : 0;
  }
}

// Each lane is a row.  row: the row's blocks in the file, or null for rows that pad the group.
template <class F>
DEVICE void pack_run(const uint8_t* row, int column, int n_in, uint8_t* run, int lane) {
  using C = typename F::Codes;
  uint32_t* words = (uint32_t*)(run + UNIT * lane);
  for (int b = 0; b < RUN_BLOCKS; ++b) {
    uint8_t codes[BLOCK];
    file_codes<F>(codes, row, column + BLOCK * b, n_in);
#pragma unroll
    for (int i = 0; i < 4 * C::UNITS; ++i)
      words[UNIT_BYTES / 4 * (C::UNITS * b + i / 4) + i % 4] = C::unit_word(codes, i / 4, i % 4);
#pragma unroll
    for (int i = 0; i < C::ROW_WORDS; ++i) {
      const int word = C::ROW_WORDS * b + i;
      words[UNIT_BYTES / 4 * (RUN_BLOCKS * C::UNITS + word / 4) + word % 4] = C::row_word(codes, i);
    }
  }
}

template <class F>
DEVICE void pack_scales(const uint8_t* row, int column, int n_in, uint8_t* scales, int lane) {
  for (int begin = 0, unit = UNIT; begin < F::SCALE_BYTES; begin += unit) {
    while (unit > F::SCALE_BYTES - begin) unit /= 2;
    for (int i = begin; i < begin + unit; ++i) {
      const int source = F::scale_source(i);
      const bool is_there = row && column + source / F::FILE_BYTES * F::FILE_COLUMNS < n_in;
      const int64_t tile = (int64_t)(column / F::FILE_COLUMNS) * F::FILE_BYTES;
      scales[GROUP * begin + unit * lane + i - begin] = is_there ? row[tile + source] : 0;
    }
  }
}

// The word of a fragment with columns 8 (i / 2) + 2 t and 8 (i / 2) + 2 t + 1 of row g + 8 (i % 2).
DEVICE uint32_t fragment_word(const uint16_t* group, int n_rows, int64_t n_in, int row, int64_t column) {
  const uint16_t* values = group + row * n_in + column;
  const uint32_t first = row < n_rows && column < n_in ? values[0] : 0;
  const uint32_t second = row < n_rows && column + 1 < n_in ? values[1] : 0;
  return first | second << 16;
}

template <class F>
DEVICE void pack_tile(const uint8_t* rows, int n_rows, int64_t row_bytes, int column, int n_in, uint8_t* tile, int lane) {
  if constexpr (!IS_FLOAT<F>) {
    const uint8_t* row = lane < n_rows ? rows + lane * row_bytes : nullptr;
    for (int run = 0; run < F::RUNS; ++run)
      pack_run<F>(row, column + RUN * run, n_in, tile + run * run_bytes<F>(), lane);
    pack_scales<F>(row, column, n_in, tile + F::RUNS * run_bytes<F>(), lane);
  } else if constexpr (F::Codes::BITS == 16) {
    const int g = lane / 4, t = lane % 4;
    for (int fragment = 0; fragment < 2 * RUN / 16; ++fragment)
      for (int i = 0; i < 4; ++i)
        ((uint32_t*)(tile + FRAGMENT_BYTES * fragment))[4 * lane + i] =
            fragment_word((const uint16_t*)rows, n_rows, n_in, fragment % 2 * 16 + i % 2 * 8 + g,
                          column + fragment / 2 * 16 + i / 2 * 8 + 2 * t);
  } else {
    for (int i = 0; i < RUN; ++i) {
      const bool is_there = lane < n_rows && column + i < n_in;
      const float* row = (const float*)rows + (int64_t)lane * n_in + column;
      ((float*)(tile + UNIT_BYTES * (i / 4)))[4 * lane + i % 4] = is_there ? row[i] : 0.0f;
    }
  }
}

// rows: uint8 [n_rows, row_bytes], blocks of FORMAT, of n_in columns.
// packed: n_tiles tiles for each group of 32 rows, including an incomplete last group.
// One warp per tile: grid (tiles over the warps of a block, groups).
extern "C" __global__ void __launch_bounds__(128, 4)
    pack(const uint8_t* __restrict__ rows, uint8_t* __restrict__ packed, int n_rows, int64_t row_bytes, int n_in, int n_tiles) {
  using F = FORMAT;
  const int tile = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, group = blockIdx.y;
  if (tile >= n_tiles) return;
  pack_tile<F>(rows + (int64_t)group * GROUP * row_bytes, n_rows - group * GROUP, row_bytes, tile * RUN * F::RUNS,
               n_in, packed + ((int64_t)group * n_tiles + tile) * tile_bytes<F>(), threadIdx.x % WARP);
}
