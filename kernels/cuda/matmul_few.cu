// Matrix products for few tokens on tensor cores; matmul_few.cuh says how.
#include "matmul_few.cuh"

// As `matvec`; n_rows is a multiple of TOKENS, and that of 8.
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matmul_few(const void* __restrict__ units, const void* __restrict__ scales, int n_rows,
               const int* __restrict__ n_tokens, int n_tiles, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1),
               MATRIX_PARAMETERS(2)) {
  constexpr int N = TOKENS / 8;
  const int first_token = blockIdx.x * TOKENS, n = *n_tokens;
  if (first_token > 0 && first_token >= n) return;  // the first tokens do not wait for n
  int group = blockIdx.y;
  const int which = CHOOSE_MATRIX(group);
  const uint8_t* tiles = CHOSEN_WEIGHTS(which) + first_tile(group, CHOSEN_ROWS(which), n_tiles) * tile_bytes<FORMAT>();
  const int laid_out = ROWS ? ROWS : n_rows;
  units = own_units<FORMAT>(units, n_tiles, laid_out);
  scales = own_scales<FORMAT>(scales, n_tiles, laid_out);
  Sums<N> acc = {};
  multiply<FORMAT, N>(acc, tiles, (const uint8_t*)units, scales, laid_out, first_token, n_tiles);
  add_chunks<FORMAT, N>(CHOSEN_MATRIX(which), group, acc, (const float*)scales, first_token, n);
}
