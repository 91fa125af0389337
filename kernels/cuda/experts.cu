// Mixtures of experts: selection of each token's experts, and the weighted sum of their outputs.
//
// A token and its k experts form k *pairs*, token * k + rank.  Pairs of one expert are stored at neighbouring *places*.
// The first place is a multiple of 8, the size of `mma` tiles, so some places are unused.  The rows of the experts'
// results are indexed by place.  The number of places is stored in the batch's header.
#include "batch.cuh"
#include "choice.cuh"

constexpr int ROUTE_WARPS = 4, GROUP_THREADS = 1024, MAX_EXPERTS = GROUP_THREADS, ALIGNMENT = 8, SUM_THREADS = 128;
constexpr int MAX_GROUPS = 64;

// In the order of GATINGS in operations/experts.py.
enum { SOFTMAX, SIGMOID, SQRT_SOFTPLUS, SIGMOID_OF_BEST, SPARSEMIXER };
// SPARSEMIXER_DISTANCE in operations/experts.py.
constexpr float SPARSEMIXER_DISTANCE = 0.02f;

// The divisor of an expert's weight with SPARSEMIXER: the sum over near logits of experts that were not selected before.
DEVICE float sum_of_near(const float* row, int n, int expert) {
  const float best = row[expert];
  float total = 0.0f;
  for (int other = 0; other < n; other++) {
    const float logit = row[other];
    const bool is_left = logit < best || (logit == best && other >= expert);
    if (is_left && best - logit <= SPARSEMIXER_DISTANCE * fmaxf(fabsf(logit), best)) total += expf(logit - best);
  }
  return total;
}

// The largest of n values, or the sum of the two largest.
DEVICE float best_of_group(const float* values, int n, int n_best) {
  float first = -infinity(), second = -infinity();
  for (int i = 0; i < n; i++) {
    second = fmaxf(second, fminf(first, values[i]));
    first = fmaxf(first, values[i]);
  }
  return n_best == 1 ? first : first + second;
}

// ids, expert_weights [T, k]: the k experts with the largest scores among a row's n logits, the lowest id first among
// equals, and their weights: softmax of all experts or, with `norm_topk_prob`, of the selected experts, times `scale`
// and `factors` [n], if not null. See sum_of_near for the weights with SPARSEMIXER.
//
// If `probabilities` is null, scores are the logits, and weights are their softmax.  Otherwise the kernel writes
// `probabilities` [T, stride] and scores [T, stride]: probabilities plus `bias` if not null, and -infinity outside the
// `n_top_groups` best of n_groups groups, ordered by their best score or the sum of their two best (n_best).
//
// places, rows: if not null, each pair's place is the pair's number; see group_by_expert.  One warp per token; k <= 32.
extern "C" __global__ void __launch_bounds__(WARP * ROUTE_WARPS)
    route(int* header, const float* logits, int logits_stride, int n, int k, int norm_topk_prob, float scale,
          int gating, const float* __restrict__ bias, int n_groups, int n_top_groups, int n_best,
          const float* __restrict__ chosen, int chosen_stride, float* probabilities, float* scores,
          const float* __restrict__ factors, int* __restrict__ ids, float* __restrict__ expert_weights,
          int* __restrict__ places, int* __restrict__ rows) {
  __shared__ float sums[ROUTE_WARPS][MAX_GROUPS];
  const int token = blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP, size = n / n_groups;
  const int n_tokens = header[N_TOKENS];
  if (token >= n_tokens) return;
  if (places && token == 0 && lane == 0) header[N_PLACES] = n_tokens * k;
  const float* row = logits + (size_t)token * logits_stride;
  float peak = -infinity(), total = 0.0f;
  if (gating == SOFTMAX && !(norm_topk_prob && !probabilities)) {
    for (int expert = lane; expert < n; expert += WARP) peak = fmaxf(peak, row[expert]);
    peak = warp_max(peak);
    for (int expert = lane; expert < n; expert += WARP) total += expf(row[expert] - peak);
    total = warp_sum(total);
  }
  if (probabilities) {
    float *to = probabilities + (size_t)token * logits_stride, *score = scores + (size_t)token * logits_stride;
    for (int expert = lane; expert < n; expert += WARP) {
      const float x = row[expert];
      const float p = gating == SOFTMAX ? expf(x - peak) / total
                      : gating == SQRT_SOFTPLUS ? sqrtf(softplus(x))
                                                : sigmoid(x);
      const float base = gating == SIGMOID_OF_BEST ? x : p;
      to[expert] = p;
      bool is_out = chosen;
      for (int rank = 0; chosen && rank < k; rank++)
        is_out &= (int)chosen[(size_t)token * chosen_stride + rank] != expert;
      score[expert] = bias ? base + bias[expert] : is_out ? -infinity() : base;
    }
    __syncwarp();
    if (n_groups > 1) {
      float* own = sums[threadIdx.x / WARP];
      for (int group = lane; group < n_groups; group += WARP) own[group] = best_of_group(score + size * group, size, n_best);
      __syncwarp();
      for (int expert = lane; expert < n; expert += WARP) {
        const int group = expert / size;
        int better = 0;
        for (int other = 0; other < n_groups; other++)
          better += own[other] > own[group] || (own[other] == own[group] && other < group);
        if (better >= n_top_groups) score[expert] = -infinity();
      }
      __syncwarp();
    }
    row = score;
  }
  uint64_t last = 0;
  int id = 0;  // lane i has the expert of rank i
  for (int rank = 0; rank < k; rank++) {
    uint64_t best = 0;
    for (int expert = lane; expert < n; expert += WARP) {
      const uint64_t key = key_of(row[expert], expert);
      if (rank == 0 || key < last) best = max(best, key);
    }
    last = best_of_warp(best);
    if (lane == rank) id = id_of(last);
  }
  const float best = __shfl_sync(FULL_MASK, row[id], 0);
  float mine = probabilities ? probabilities[(size_t)token * logits_stride + id] : expf(row[id] - best);
  if (norm_topk_prob) {
    total = 0.0f;
    for (int rank = 0; rank < k; rank++) total += __shfl_sync(FULL_MASK, mine, rank);
  } else if (probabilities) {
    total = 1.0f;
  }
  if (lane >= k) return;
  if (gating == SPARSEMIXER) mine = 1.0f, total = sum_of_near(row, n, id);
  const int pair = token * k + lane;
  ids[pair] = id;
  expert_weights[pair] = mine / total * (factors ? factors[id] : 1.0f) * scale;
  if (places) places[pair] = pair, rows[pair] = token;
}

// The sum of `value` over this lane and the previous lanes.
DEVICE int sum_up_to_lane(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int before = __shfl_up_sync(FULL_MASK, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// Groups the pairs by expert, and divides them into products of up to `product_rows` rows.
//
// ids: the expert of each pair.  places: the place of each pair; the order among pairs of one expert is undefined.
// rows: the token of each place, or -1.  products: expert, first place, end place (exclusive).  One block.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    group_by_expert(int* __restrict__ header, const int* __restrict__ ids, int k, int n_experts, int product_rows,
                    int* __restrict__ places, int* __restrict__ rows, int4* __restrict__ products,
                    int* __restrict__ n_products) {
  __shared__ int counts[MAX_EXPERTS], cursors[MAX_EXPERTS], first_products[MAX_EXPERTS];
  const int n_pairs = header[N_TOKENS] * k, expert = threadIdx.x;
  counts[expert] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < n_pairs; pair += GROUP_THREADS) atomicAdd(&counts[ids[pair]], 1);
  __syncthreads();
  if (threadIdx.x < WARP) {
    int n_places = 0, n_cut = 0;
    for (int first = 0; first < n_experts; first += WARP) {
      const int count = counts[first + threadIdx.x];
      const int own_places = (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
      const int own_products = (count + product_rows - 1) / product_rows;
      const int up_to_places = sum_up_to_lane(own_places, threadIdx.x);
      const int up_to_products = sum_up_to_lane(own_products, threadIdx.x);
      cursors[first + threadIdx.x] = n_places + up_to_places - own_places;
      first_products[first + threadIdx.x] = n_cut + up_to_products - own_products;
      n_places += __shfl_sync(FULL_MASK, up_to_places, WARP - 1);
      n_cut += __shfl_sync(FULL_MASK, up_to_products, WARP - 1);
    }
    if (threadIdx.x == 0) {
      header[N_PLACES] = n_places;
      *n_products = n_cut;
    }
  }
  __syncthreads();
  if (expert < n_experts) {
    const int begin = cursors[expert], end = begin + counts[expert];
    for (int place = end; place % ALIGNMENT; place++) rows[place] = -1;
    for (int place = begin, i = first_products[expert]; place < end; place += product_rows, i++)
      products[i] = make_int4(expert, place, min(place + product_rows, end), 0);
  }
  __syncthreads();  // all threads have read the start of their expert
  for (int pair = threadIdx.x; pair < n_pairs; pair += GROUP_THREADS) {
    const int place = atomicAdd(&cursors[ids[pair]], 1);
    places[pair] = place;
    rows[place] = pair / k;
  }
}

// y = y * the pair's weight + the bias of its expert, over rows of n values by place; null omits weight or bias.  Grid:
// (blocks of 512 columns, pairs).  y, biases [experts]: `stride` values per row, a multiple of 4.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    finish_experts(const int* __restrict__ header, const int* __restrict__ places, const int* __restrict__ ids,
                   const float* __restrict__ expert_weights, const float* __restrict__ biases, int k,
                   float* __restrict__ y, int y_stride, int n) {
  const int pair = blockIdx.y, column = 4 * (blockIdx.x * SUM_THREADS + threadIdx.x);
  if (pair >= header[N_TOKENS] * k || column >= n) return;
  const float weight = expert_weights ? expert_weights[pair] : 1.0f;
  float4* row = (float4*)(y + (size_t)places[pair] * y_stride + column);
  const float4* bias = (const float4*)(biases + (size_t)ids[pair] * y_stride + column);
  *row = multiply_add(*row, weight, biases ? *bias : float4());
}

// y = (y +) the sum of each token's products, n values each, by place, times their weights if not null, starting with
// the best expert.  Grid: (blocks of 512 columns, tokens).  Strides are multiples of 4.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    add_experts(const int* __restrict__ header, const int* __restrict__ places,
                const float* __restrict__ expert_weights, int k, const float* __restrict__ products,
                int products_stride, int n, float* __restrict__ y, int y_stride, int adds) {
  const int token = blockIdx.y, column = 4 * (blockIdx.x * SUM_THREADS + threadIdx.x);
  if (token >= header[N_TOKENS] || column >= n) return;
  float4 total = {};
  for (int pair = token * k; pair < token * k + k; pair++) {
    const float4 v = *(const float4*)(products + (size_t)places[pair] * products_stride + column);
    total = multiply_add(v, expert_weights ? expert_weights[pair] : 1.0f, total);
  }
  float4* sum = (float4*)(y + (size_t)token * y_stride + column);
  *sum = multiply_add(total, 1.0f, adds ? *sum : float4());
}
