// As matmul.cu, with the matrices of experts: a block has 4 groups of 32 rows, and up to TOKENS tokens of an expert.
#include "matmul.cuh"

#if __CUDA_ARCH__ >= 800

// y = x W^T, where each row has the matrix W of its expert.
//
// weights: of all experts, one after the other.  products: expert, first row, a multiple of 8, and the one behind the
// last, at most TOKENS.  Grid (products, 4 groups of rows each).  The rest is as of `matmul`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_experts(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                   const int* __restrict__ n_products, int n_tiles, int n_chunks, const int4* __restrict__ products,
                   MATRIX_PARAMETERS(0)) {
  if (blockIdx.x >= *n_products) return;
  const int4 product = products[blockIdx.x];
  const int groups = n_groups(n_out0);
  const Matrix matrix = MATRIX(0);
  const uint8_t* weights = weights0 + (int64_t)product.x * groups * n_tiles * tile_bytes<FORMAT>();
  const Sources from = {weights,   (const uint8_t*)units,       scales, n_rows, product.y,
                        product.z, (int)blockIdx.y * ROW_WARPS, groups, n_tiles};
  multiply<FORMAT, TOKENS, STAGES>(matrix, from, n_chunks);
}

#endif
