// As matmul_few.cu, with the matrices of experts: a block has a group of 32 rows, and 8 tokens of an expert.
#include "matmul_few.cuh"

// y = x W^T, where each row has the matrix W of its expert, for up to three of them.
//
// weights: of all experts, one after the other.  products: expert, first row, a multiple of 8, and the one behind the
// last.  Grid (products, groups of rows of all matrices).  The rest is as of `matmul_few`.
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matmul_few_experts(const void* __restrict__ units, const void* __restrict__ scales, int n_rows,
                       const int* __restrict__ n_products, int n_tiles, const int4* __restrict__ products,
                       MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1), MATRIX_PARAMETERS(2)) {
  if (blockIdx.x >= *n_products) return;
  const int4 product = products[blockIdx.x];
  int group = blockIdx.y;
  const int which = CHOOSE_MATRIX(group);
  const int64_t first_group = (int64_t)product.x * n_groups(CHOSEN_ROWS(which));
  const uint8_t* tiles = CHOSEN_WEIGHTS(which) + (first_group + group) * n_tiles * tile_bytes<FORMAT>();
  Sums<1> acc = {};
  multiply<FORMAT, 1>(acc, tiles, (const uint8_t*)units, scales, n_rows, product.y, n_tiles);
  add_chunks<FORMAT, 1>(CHOSEN_MATRIX(which), group, acc, (const float*)scales, product.y, product.z);
}
