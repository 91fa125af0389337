// Matrix products for many tokens, on tensor cores; matmul.cuh says how.
#include "matmul.cuh"

#if __CUDA_ARCH__ >= 800

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

#endif
