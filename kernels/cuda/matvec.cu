// Matrix products for few tokens; matvec.cuh says how.
#include "matvec.cuh"

// y = x W^T (+ bias) (+ residual) for up to three matrices W.
//
// units, scales: activations (activations.cuh), laid out for n_rows, a multiple of TOKENS; ROWS is that, or 0.
// n_tokens: how many there are.  n_tiles: tiles along a row of weights.  A warp a chunk of columns; grid (TOKENS tokens
// each, groups of rows of all matrices, heads): blocks that read the same weights run together.
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
           const int* __restrict__ n_tokens, int n_tiles, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1),
           MATRIX_PARAMETERS(2)) {
  __shared__ ChunkSums<TOKENS> sums;
  const int first_token = blockIdx.x * TOKENS, n = *n_tokens;
  if (first_token > 0 && first_token >= n) return;  // the first tokens do not wait for n
  const int laid_out = ROWS ? ROWS : n_rows;
  const Inputs x = {(const int4*)own_units<FORMAT>(units, n_tiles, laid_out) + first_token,
                    (const float2*)own_scales<FORMAT>(scales, n_tiles, laid_out) + first_token, laid_out};
  int group = blockIdx.y;
  const int which = CHOOSE_MATRIX(group);
  const uint8_t* tiles = CHOSEN_WEIGHTS(which) + first_tile(group, CHOSEN_ROWS(which), n_tiles) * tile_bytes<FORMAT>();
  multiply<FORMAT, TOKENS>(sums, tiles, x, n_tiles);
  add_chunks(CHOSEN_MATRIX(which), group, sums, first_token, n);
}
