// Operations other than products and attention: norms, gates, and the choice of tokens.
//
// Rows of float32 are aligned to 16 bytes; strides are in values, and multiples of 4.  Inputs of a matrix product can
// be written directly as codes and scales (activations.cuh), with the same bits as by `quantise`.  All kernels are
// limited by memory bandwidth; for one token they take a launch and the latency of two reads.
#include "activations.cuh"
#include "batch.cuh"
#include "choice.cuh"
#include "gate.cuh"

#define ROW_THREADS 512
#define ROW_WARPS (ROW_THREADS / WARP)

// -- RMS norm ---------------------------------------------------------------------------------------------------------

// The sum of a block's values, in all its threads, always in the same order.
DEVICE float block_sum(float value, float* parts) {
  value = warp_sum(value);
  if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < ROW_WARPS; warp++) total += parts[warp];
  return total;
}

// 1 / sqrt(mean of the row's squares + eps), in all threads of a block.  Prefetches the weight, which is no longer in
// any cache since the last token.
DEVICE float scale_of_row(const float* row, const float* weight, int n, float eps) {
  __shared__ float parts[ROW_WARPS];
  float squares = 0.0f;
  for (int column = 4 * threadIdx.x; column < n; column += 4 * ROW_THREADS) {
    if (weight && threadIdx.x % 8 == 0) prefetch(weight + column);  // 128 bytes
    const float4 v = load_four(row, column, n);
    squares = fmaf(v.x, v.x, squares);
    squares = fmaf(v.y, v.y, squares);
    squares = fmaf(v.z, v.z, squares);
    squares = fmaf(v.w, v.w, squares);
  }
  return 1.0f / sqrtf(block_sum(squares, parts) / (float)n + eps);
}

DEVICE float4 normed(const float* row, const float* weight, int column, int n, float scale) {
  const float4 v = load_four(row, column, n);
  if (!weight) return make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
  const float4 w = load_four(weight, column, n);
  return make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
}

// y = x / sqrt(mean(x^2) + eps) * weight, over groups of n values.  Grid: (rows, groups of a row); with several groups,
// n is a multiple of 16.  weight: padded to a multiple of 4, with `weight_step` values between groups; or null.  Either
// y, or units and scales laid out for n_rows rows, may be null; codes require one group per row.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    rms_norm(const int* __restrict__ header, const float* __restrict__ x, int x_stride, int n,
             const float* __restrict__ weight, float eps, int weight_step, float* __restrict__ y, int y_stride,
             int8_t* __restrict__ units, float2* __restrict__ scales, int n_rows) {
  let_next_begin();
  if (is_beyond(blockIdx.x, header + N_TOKENS)) return;
  const float* row = x + (size_t)blockIdx.x * x_stride + (size_t)blockIdx.y * n;
  const float* own = weight ? weight + (size_t)blockIdx.y * weight_step : nullptr;
  float* to = y + (size_t)blockIdx.x * y_stride + (size_t)blockIdx.y * n;
  const float scale = scale_of_row(row, own, n, eps);
  for (int run = threadIdx.x / WARP; RUN * run < n; run += ROW_WARPS) {
    const int column = RUN * run + threadIdx.x % WARP * 4;
    const float4 v = normed(row, own, column, n, scale);
    if (y && column < n) *(float4*)(to + column) = v;
    if (units) store_codes(v, units, scales, run, blockIdx.x, n_rows);
  }
}

// -- Layer norm -------------------------------------------------------------------------------------------------------

// The mean and the variance of n values, in all threads of a block.
DEVICE float2 mean_and_variance(const float* row, int n) {
  __shared__ float parts[2][ROW_WARPS];
  float total = 0.0f, squares = 0.0f;
  for (int column = threadIdx.x; column < n; column += ROW_THREADS) total += row[column];
  const float mean = block_sum(total, parts[0]) / (float)n;
  for (int column = threadIdx.x; column < n; column += ROW_THREADS)
    squares = fmaf(row[column] - mean, row[column] - mean, squares);
  return make_float2(mean, block_sum(squares, parts[1]) / (float)n);
}

// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over groups of n values.  Grid: (rows, groups of a row).
// bias: or null.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    layer_norm(const int* __restrict__ header, const float* __restrict__ x, int x_stride, int n,
               const float* __restrict__ weight, const float* __restrict__ bias, float eps, float* __restrict__ y,
               int y_stride) {
  if (is_beyond(blockIdx.x, header + N_TOKENS)) return;
  const size_t first = (size_t)blockIdx.y * n;
  const float* row = x + (size_t)blockIdx.x * x_stride + first;
  const float2 moments = mean_and_variance(row, n);
  const float scale = 1.0f / sqrtf(moments.y + eps);
  for (int column = threadIdx.x; column < n; column += ROW_THREADS)
    y[(size_t)blockIdx.x * y_stride + first + column] =
        (row[column] - moments.x) * scale * weight[first + column] + (bias ? bias[first + column] : 0.0f);
}

// -- Activations ------------------------------------------------------------------------------------------------------

DEVICE float4 gated(int kind, const float* gate, const float* up, size_t row, int column, int n) {
  const float4 g = load_four(gate + row, column, n);
  const float4 u = up ? load_four(up + row, column, n) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  return make_float4(activated(kind, g.x, u.x), activated(kind, g.y, u.y), activated(kind, g.z, u.z),
                     activated(kind, g.w, u.w));
}

#define GATE_WARPS 4

// y = activation(gate) * up, over rows of n values.  Grid: (blocks of 512 columns, rows).  up: null means 1.  Either y,
// or units and scales laid out for n_rows rows, may be null.
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    gated(const int* __restrict__ header, int kind, const float* __restrict__ gate, const float* __restrict__ up,
          int stride, int n, float* __restrict__ y, int y_stride, int8_t* __restrict__ units,
          float2* __restrict__ scales, int n_rows) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x), run = column / RUN;
  if (is_beyond(row, header + N_TOKENS) || RUN * run >= n) return;
  const float4 v = gated(kind, gate, up, (size_t)row * stride, column, n);
  if (y && column < n) *(float4*)(y + (size_t)row * y_stride + column) = v;
  if (units) store_codes(v, units, scales, run, row, n_rows);
}

// y = activation(gate) * x, with one gate per head of dim values.  Rows of n values.  Grid: (blocks of 512 columns,
// rows).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    head_gate(const int* __restrict__ header, int kind, const float* x, int x_stride, int n, int dim,
              const float* __restrict__ gate, int gate_stride, float* y, int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (is_beyond(row, header + N_TOKENS) || column >= n) return;
  const float g = activated(kind, gate[(size_t)row * gate_stride + column / dim], 1.0f);
  const float4 v = load_four(x + (size_t)row * x_stride, column, n);
  *(float4*)(y + (size_t)row * y_stride + column) = make_float4(g * v.x, g * v.y, g * v.z, g * v.w);
}

// y = factor * weight * sigmoid(gate) * x + residual, over rows of n values; weight, gate and residual may be null.
// Grid: (blocks of 512 columns, rows).  weight: one value.  gate: one value per row.  y may be the residual, or x.
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    add(const int* __restrict__ header, const float* x, int x_stride, int n, float factor, const float* weight,
        const float* gate, int gate_stride, const float* residual, float* y, int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (is_beyond(row, header + N_TOKENS) || column >= n) return;
  if (weight) factor *= *weight;
  if (gate) factor *= sigmoid(gate[(size_t)row * gate_stride]);
  const float4 v = load_four(x + (size_t)row * x_stride, column, n);
  const float4 r = residual ? load_four(residual + (size_t)row * y_stride, column, n) : float4();
  *(float4*)(y + (size_t)row * y_stride + column) = multiply_add(v, factor, r);
}

// y = x clamped to low ... high, over rows of n values.  Grid: (blocks of 512 columns, rows).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    clamp(const int* __restrict__ header, const float* x, int x_stride, int n, float low, float high, float* y,
          int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (is_beyond(row, header + N_TOKENS) || column >= n) return;
  const float4 v = load_four(x + (size_t)row * x_stride, column, n);
  *(float4*)(y + (size_t)row * y_stride + column) =
      make_float4(fmaxf(fminf(v.x, high), low), fmaxf(fminf(v.y, high), low), fmaxf(fminf(v.z, high), low),
                  fmaxf(fminf(v.w, high), low));
}

DEVICE float xielu(float x, float positive, float negative, float beta, float eps) {
  return (x > 0.0f ? positive * x * x : negative * (expm1f(fminf(x, eps)) - x)) + beta * x;
}

// y = positive x^2 + beta x if x > 0, else negative (exp(min(x, eps)) - 1 - x) + beta x, over rows of n values.  Grid:
// (blocks of 512 columns, rows).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    xielu(const int* __restrict__ header, const float* x, int x_stride, int n, float positive, float negative,
          float beta, float eps, float* y, int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (is_beyond(row, header + N_TOKENS) || column >= n) return;
  const float4 v = load_four(x + (size_t)row * x_stride, column, n);
  *(float4*)(y + (size_t)row * y_stride + column) =
      make_float4(xielu(v.x, positive, negative, beta, eps), xielu(v.y, positive, negative, beta, eps),
                  xielu(v.z, positive, negative, beta, eps), xielu(v.w, positive, negative, beta, eps));
}

// y = cap * tanh(x / cap), over rows of n values.  Grid: (blocks of 512 columns, rows).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    softcap(const int* __restrict__ header, const float* __restrict__ x, int x_stride, int n, float cap,
            float* __restrict__ y, int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (row >= header[N_TOKENS] || column >= n) return;
  const float4 v = load_four(x + (size_t)row * x_stride, column, n);
  *(float4*)(y + (size_t)row * y_stride + column) = make_float4(
      cap * tanhf(v.x / cap), cap * tanhf(v.y / cap), cap * tanhf(v.z / cap), cap * tanhf(v.w / cap));
}

// -- Rows with outputs ------------------------------------------------------------------------------------------------

// Row i of y is row rows[i] of x.  Grid: (blocks of 512 columns, rows of y).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    gather_rows(const int* __restrict__ header, const int* __restrict__ rows, const float* __restrict__ x,
                int x_stride, int n, float* __restrict__ y, int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (row >= header[N_OUTPUTS] || column >= n) return;
  *(float4*)(y + (size_t)row * y_stride + column) = load_four(x + (size_t)rows[row] * x_stride, column, n);
}

// Row i of y is the `n_joined` rows of x from rows[i], concatenated, or their mean if `is_mean`.
// Grid: (blocks of 512 columns of x, rows of y).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    join_rows(const int* __restrict__ header, const int* __restrict__ rows, int n_joined, int is_mean,
              const float* __restrict__ x, int x_stride, int n, float* __restrict__ y, int y_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (row >= header[N_OUTPUTS] || column >= n) return;
  x += (size_t)rows[row] * x_stride;
  y += (size_t)row * y_stride;
  float4 total = load_four(x, column, n);
  for (int j = 0; j < n_joined; j++) {
    const float4 v = load_four(x + (size_t)j * x_stride, column, n);
    if (!is_mean) {
      const float each[4] = {v.x, v.y, v.z, v.w};
      for (int i = 0; i < 4 && column + i < n; i++) y[j * n + column + i] = each[i];
    } else if (j) {
      total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
  }
  const float share = 1.0f / n_joined;
  if (is_mean)
    *(float4*)(y + column) = make_float4(total.x * share, total.y * share, total.z * share, total.w * share);
}

// x plus n values of the token's separate embedding, if any.  Grid: (blocks of 512 columns, rows).
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    add_rows(const int* __restrict__ header, const int* __restrict__ ids, const float* __restrict__ embeddings,
             int embeddings_stride, int n, float* __restrict__ x, int x_stride) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x);
  if (row >= header[N_TOKENS] || column >= n || !is_embedded(ids[row])) return;
  const float4 added = load_four(embeddings + (size_t)embedding_number(ids[row]) * embeddings_stride, column, n);
  float4* const to = (float4*)(x + (size_t)row * x_stride + column);
  *to = make_float4(to->x + added.x, to->y + added.y, to->z + added.z, to->w + added.w);
}

// -- Streams ----------------------------------------------------------------------------------------------------------

// Mixes streams of d values: stream j is the sum over i of (weights[j * n_streams + i] + offset) * x_i, plus the
// residual.  Streams before number `first` equal the residual.  Grid: (blocks of 512 columns, rows).  weights,
// residual: or null.
extern "C" __global__ void __launch_bounds__(WARP * GATE_WARPS)
    mix_streams(const int* __restrict__ header, const float* __restrict__ x, int x_stride,
                const float* __restrict__ weights, int weights_stride, const float* __restrict__ residual,
                int residual_stride, int n_streams, int first, int d, float offset, float* __restrict__ y, int y_stride,
                int n) {
  const int row = blockIdx.y, column = 4 * (blockIdx.x * (WARP * GATE_WARPS) + threadIdx.x), j = column / d;
  if (is_beyond(row, header + N_TOKENS) || column >= n) return;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (residual) total = *(const float4*)(residual + (size_t)row * residual_stride + column);
  for (int i = 0; i < n_streams && j >= first; i++) {
    const float weight = (weights ? weights[(size_t)row * weights_stride + j * n_streams + i] : 0.0f) + offset;
    total = multiply_add(*(const float4*)(x + (size_t)row * x_stride + i * d + column % d), weight, total);
  }
  *(float4*)(y + (size_t)row * y_stride + column) = total;
}

// The weights of n hyper-connected streams of each row (operations.HyperWeights): one, two or three kinds; kinds whose
// pointer is null are skipped.  Grid: (rows), with one thread each.
extern "C" __global__ void hyper_weights(const int* __restrict__ header, const float* __restrict__ x, int x_stride,
                                         const float* __restrict__ scale, const float* __restrict__ bias, int n,
                                         float eps, float write_scale, float write_offset, int rounds,
                                         float* __restrict__ read, int read_stride, float* __restrict__ write,
                                         int write_stride, float* mix, int mix_stride) {
  if (is_beyond(blockIdx.x, header + N_TOKENS)) return;
  x += (size_t)blockIdx.x * x_stride;
  for (int i = 0; i < n; i++) {
    read[(size_t)blockIdx.x * read_stride + i] = sigmoid(x[i] * scale[0] + bias[i]) + eps;
    if (write)
      write[(size_t)blockIdx.x * write_stride + i] =
          write_scale * sigmoid(x[n + i] * scale[1] + bias[n + i]) + write_offset;
  }
  if (!mix) return;
  mix += (size_t)blockIdx.x * mix_stride;  // [result stream, input stream]: columns are contiguous
  for (int i = 0; i < n; i++) {
    float largest = -3e38f, total = 0.0f;
    for (int j = 0; j < n; j++) {
      const int place = 2 * n + n * i + j;
      mix[n * j + i] = x[place] * scale[2] + bias[place];
      largest = fmaxf(largest, mix[n * j + i]);
    }
    for (int j = 0; j < n; j++) total += mix[n * j + i] = expf(mix[n * j + i] - largest);
    for (int j = 0; j < n; j++) mix[n * j + i] = mix[n * j + i] / total + eps;
  }
  for (int turn = 0; turn < 2 * rounds - 1; turn++) {
    const int step = turn % 2 ? n : 1, next = turn % 2 ? 1 : n;
    for (int i = 0; i < n; i++) {
      float total = eps;
      for (int j = 0; j < n; j++) total += mix[next * i + step * j];
      for (int j = 0; j < n; j++) mix[next * i + step * j] /= total;
    }
  }
}

// y = sigmoid(sign(s) * sqrt(max(|s|, 1e-6))), where s = scale * key * query, for each stream of n values.
// Grid: (streams, rows).
extern "C" __global__ void __launch_bounds__(WARP)
    stream_gate(const int* __restrict__ header, const float* __restrict__ key, int key_stride,
                const float* __restrict__ query, int query_stride, int n, float scale, float* __restrict__ y,
                int y_stride) {
  const int stream = blockIdx.x, row = blockIdx.y;
  if (is_beyond(row, header + N_TOKENS)) return;
  key += (size_t)row * key_stride + stream * n;
  query += (size_t)row * query_stride + stream * n;
  float product = 0.0f;
  for (int i = threadIdx.x; i < n; i += WARP) product = fmaf(key[i], query[i], product);
  product = warp_sum(product) * scale;
  const float root = sqrtf(fmaxf(fabsf(product), 1e-6f));
  if (threadIdx.x == 0)
    y[(size_t)row * y_stride + stream] = product == 0.0f ? 0.5f : sigmoid(product < 0.0f ? -root : root);
}

// y = sqrt(mean(x^2)), over rows of n values.  Grid: (rows).
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    root_mean_square(const int* __restrict__ header, const float* __restrict__ x, int x_stride, int n,
                     float* __restrict__ y, int y_stride) {
  __shared__ float parts[ROW_WARPS];
  if (is_beyond(blockIdx.x, header + N_TOKENS)) return;
  const float* row = x + (size_t)blockIdx.x * x_stride;
  float squares = 0.0f;
  for (int column = threadIdx.x; column < n; column += ROW_THREADS) squares = fmaf(row[column], row[column], squares);
  squares = block_sum(squares, parts);
  if (threadIdx.x == 0) y[(size_t)blockIdx.x * y_stride] = sqrtf(squares / (float)n);
}

// y = max(0, x - mean(x) - factor * sqrt(var(x))), over rows of n values.  Grid: (rows).
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    above_deviation(const int* __restrict__ header, const float* __restrict__ x, int x_stride, int n, float factor,
                    float* __restrict__ y, int y_stride) {
  if (is_beyond(blockIdx.x, header + N_TOKENS)) return;
  const float* row = x + (size_t)blockIdx.x * x_stride;
  const float2 moments = mean_and_variance(row, n);
  const float cut = moments.x + factor * sqrtf(moments.y);
  for (int column = threadIdx.x; column < n; column += ROW_THREADS)
    y[(size_t)blockIdx.x * y_stride + column] = fmaxf(row[column] - cut, 0.0f);
}

// -- Heads ------------------------------------------------------------------------------------------------------------

// Copies n columns of each head of x to y.  Grid: (heads, rows).
extern "C" __global__ void __launch_bounds__(WARP)
    copy_heads(const int* __restrict__ header, const float* __restrict__ x, int x_stride, int x_head_stride, int n,
               float* __restrict__ y, int y_stride, int y_head_stride) {
  const int head = blockIdx.x, row = blockIdx.y;
  if (row >= header[N_TOKENS]) return;
  for (int column = 4 * threadIdx.x; column < n; column += 4 * WARP)
    *(float4*)(y + (size_t)row * y_stride + head * y_head_stride + column) =
        *(const float4*)(x + (size_t)row * x_stride + head * x_head_stride + column);
}

// -- Choice of tokens -------------------------------------------------------------------------------------------------

#define SORT_THREADS 1024
#define SORTED (2 * SORT_THREADS)

// Address of the logits in `found`: they follow the ids of all rows.
DEVICE float* values_of(int* found, const int* header, int k) { return (float*)(found + header[N_OUTPUTS] * k); }

// found: the id of the best logit of each row of logits [N, n], and this logit.  Grid: (rows).
extern "C" __global__ void __launch_bounds__(SORT_THREADS, 1)
    argmax(const int* __restrict__ header, const float* __restrict__ logits, int logits_stride, int n,
           int* __restrict__ found) {
  __shared__ uint64_t parts[SORT_THREADS / WARP];
  if (blockIdx.x >= header[N_OUTPUTS]) return;
  const float* row = logits + (size_t)blockIdx.x * logits_stride;
  uint64_t best = 0;
  for (int column = 4 * threadIdx.x; column < n; column += 4 * SORT_THREADS) {
    const float4 v = load_four(row, column, n);
    const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (column + i < n) best = max(best, key_of(four[i], column + i));
  }
  best = best_of_warp(best);
  if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = best;
  __syncthreads();
  if (threadIdx.x >= WARP) return;
  best = best_of_warp(parts[threadIdx.x]);
  if (threadIdx.x) return;
  found[blockIdx.x] = id_of(best);
  values_of(found, header, 1)[blockIdx.x] = row[id_of(best)];
}

// Sorts keys [SORTED] in descending order (bitonic sort: Batcher, 1968).  Called by all threads of the block, after
// they have written the keys.
DEVICE void sort_keys(uint64_t* keys) {
  for (int size = 2; size <= SORTED; size *= 2) {
    for (int step = size / 2; step; step /= 2) {
      __syncthreads();
      const int i = 2 * threadIdx.x - (threadIdx.x & (step - 1));
      const uint64_t a = keys[i], b = keys[i + step];
      const bool is_falling = (i & size) == 0;
      if ((a < b) == is_falling) keys[i] = b, keys[i + step] = a;
    }
  }
  __syncthreads();
}

// parts [rows, gridDim.x, k] = the keys of the k best of each SORTED columns.  Grid: (all columns / SORTED, rows).
extern "C" __global__ void __launch_bounds__(SORT_THREADS, 1)
    top_parts(const int* __restrict__ header, const float* __restrict__ logits, int logits_stride, int n, int k,
              uint64_t* __restrict__ parts) {
  __shared__ uint64_t keys[SORTED];
  if (blockIdx.y >= header[N_OUTPUTS]) return;
  const float* row = logits + (size_t)blockIdx.y * logits_stride;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = half * SORT_THREADS + threadIdx.x, column = SORTED * blockIdx.x + i;
    keys[i] = column < n ? key_of(row[column], column) : 0;
  }
  sort_keys(keys);
  if (threadIdx.x < k) parts[((size_t)blockIdx.y * gridDim.x + blockIdx.x) * k + threadIdx.x] = keys[threadIdx.x];
}

// Sampling of the token that a row continues with; the best one if top_k is 0.
struct Draw {
  float top_k, top_p, min_p, temperature, u;

  // The index that a sampler draws with u (localllm/sampling), except that it uses float64, among n logits in
  // descending order.  Parameters are exp(x - largest) and exp((x - largest) / temperature).
  __device__ __forceinline__ int place(const float* weights, const float* tempered, int n) const {
    n = min(n, (int)top_k);
    float total = 0.0f, sum = 0.0f;
    int kept = 0, at = 0;
    for (int i = 0; i < n; i++) total += weights[i];
    while (kept < n && (kept == 0 || sum < top_p * total)) sum += weights[kept++];
    while (kept > 1 && weights[kept - 1] < min_p) kept--;
    total = sum = 0.0f;
    for (int i = 0; i < kept; i++) total += tempered[i];
    while (at < kept - 1 && (sum += tempered[at]) <= u * total) at++;
    return at;
  }
};

// found [2, rows, k]: the k best of each row in descending order, from n_keys = k * (blocks of `top_parts`) keys;
// unused ids are -1.  chosen [rows], also stored after `found`: the id that the row continues with.  Grid: (rows).  k:
// 1 ... SORT_THREADS.
extern "C" __global__ void __launch_bounds__(SORT_THREADS, 1)
    top_merge(const int* __restrict__ header, const uint64_t* __restrict__ parts, int n_keys, int k,
              const float* __restrict__ logits, int logits_stride, const Draw* __restrict__ draws,
              int* __restrict__ found, int* __restrict__ chosen) {
  __shared__ uint64_t keys[SORTED];
  __shared__ float weights[2][SORT_THREADS];
  if (blockIdx.x >= header[N_OUTPUTS]) return;
  const uint64_t* row = parts + (size_t)blockIdx.x * n_keys;
  if (threadIdx.x < k) keys[threadIdx.x] = 0;
  for (int first = 0; first < n_keys; first += SORTED - k) {
    for (int i = threadIdx.x; i < SORTED - k; i += SORT_THREADS) keys[k + i] = first + i < n_keys ? row[first + i] : 0;
    sort_keys(keys);
  }
  const Draw draw = draws[blockIdx.x];
  if (threadIdx.x < k) {
    const uint64_t key = keys[threadIdx.x];
    const size_t to = (size_t)blockIdx.x * k + threadIdx.x;
    const float* row = logits + (size_t)blockIdx.x * logits_stride;
    const float x = key ? row[id_of(key)] : 0.0f, less = key ? x - row[id_of(keys[0])] : -infinity();
    found[to] = key ? id_of(key) : -1;
    values_of(found, header, k)[to] = x;
    weights[0][threadIdx.x] = expf(less);
    weights[1][threadIdx.x] = expf(less / draw.temperature);
  }
  __syncthreads();
  if (threadIdx.x) return;
  const int id = id_of(keys[draw.top_k > 0.0f ? draw.place(weights[0], weights[1], k) : 0]);
  chosen[blockIdx.x] = id;
  ((int*)values_of(found, header, k))[header[N_OUTPUTS] * k + blockIdx.x] = id;
}
