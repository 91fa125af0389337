// As matvec.cu, with the matrices of experts: a block has a group of 32 rows, and one token of an expert.
#include "matvec.cuh"

// y = x W^T, where each row has the matrix W of its expert, for up to three of them.
//
// weights: of all experts, one after the other.  experts, places: of each of the n_tokens * k pairs (experts.cu).  Rows of
// units, scales and y are places.  Grid (pairs, groups of rows of all matrices).  The rest is as of `matvec`.
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matvec_experts(const void* __restrict__ units, const float2* __restrict__ scales, int n_rows,
                   const int* __restrict__ n_tokens, int n_tiles, int k, const int* __restrict__ experts,
                   const int* __restrict__ places, MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1), MATRIX_PARAMETERS(2)) {
  __shared__ ChunkSums<1> sums;
  const int pair = blockIdx.x;
  if (pair >= *n_tokens * k) return;
  const int place = places[pair];
  const Inputs x = {(const int4*)units + place, scales + place, n_rows};
  int group = blockIdx.y;
  const int which = CHOOSE_MATRIX(group);
  const int64_t first_group = (int64_t)experts[pair] * n_groups(CHOSEN_ROWS(which));
  const uint8_t* tiles = CHOSEN_WEIGHTS(which) + (first_group + group) * n_tiles * tile_bytes<FORMAT>();
  multiply<FORMAT, 1>(sums, tiles, x, n_tiles);
  add_chunks(CHOSEN_MATRIX(which), group, sums, place, place + 1);
}
