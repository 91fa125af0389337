// Selection of positions: scores of an indexer, the largest scores, and attention to the selected positions only.
//
// Correct, but not tuned yet: single threads compute products, and each query head reads its selected positions
// separately.
// HEADS, DIM, RUN, LAST: of the indexer, whose queries have DIM values, and which selects runs of RUN positions; with
// LAST, each head selects separately, and the LAST last runs are always selected.  RUN_KEY: the first value of a run's
// key, among the values of its last position.  KEY_DIM, VALUE_DIM, KEY_BITS, VALUE_BITS, KV_HEADS, VALUES_IN_KEYS,
// STRIDE (tokens per entry): of the cache that is read.  TOP: runs or positions that a token attends to; BY_HEAD:
// separately for each key/value head.  ENTRIES: tokens per entry of a second cache, which is read in addition to a
// window; 0 without one.  SERIES: number of series of values of a run of RUN tokens; with two, the first series is used
// for the next run.
#include "batch.cuh"
#include "common.cuh"

constexpr int THREADS = 128, DIGIT = 11, DIGITS = 1 << DIGIT;

// The block table of a token's sequence.
DEVICE const int* table_of(int token, const int* starts, const int* tables, int table_stride) {
  int sequence = 0;
  while (starts[sequence + 1] <= token) sequence++;
  return tables + (size_t)sequence * table_stride;
}

// The key or the value of a head at a position, with ROW values of BITS bits, and its scales.
template <int ROW, int BITS>
struct Entry {
  static constexpr int GROUPS = (ROW + PER_SCALE - 1) / PER_SCALE;
  const uint8_t* values;
  const uint16_t* scales;
  int place;

  __device__ __forceinline__ Entry(const uint8_t* entries, const uint16_t* all_scales, const int* table, int position,
                                   int head = 0, int stride = STRIDE) {
    const size_t block = (size_t)table[position / PAGE] * KV_HEADS + head;
    place = position % PAGE / stride;
    values = entries + block * ((stride < PAGE ? PAGE / stride : 1) * ROW * BITS / 8);
    scales = all_scales + block * GROUPS * PAGE + place;
  }

  __device__ __forceinline__ float operator[](int i) const {
    const int at = place * ROW + i;
    if (BITS == 16) return half_to_float(((const uint16_t*)values)[at]);
    int code = ((const int8_t*)values)[at];
    if (BITS < 8) {
      code = (values[at / 16 * 8 + at % 8] >> at % 16 / 8 * 4 & 15) - (1 << (BITS - 1));
      if (BITS == 5) code += (((const uint16_t*)(values + PAGE * ROW / 2))[at / 16] >> at % 16 & 1) << 4;
    }
    return code * half_to_float(scales[i / PER_SCALE * PAGE]);
  }
};

constexpr int KEY_HEAD = (KEY_DIM + 15) / 16 * 16, VALUE_HEAD = (VALUE_DIM + 15) / 16 * 16;
using Key = Entry<KEY_HEAD, KEY_BITS>;

#if defined(SERIES)
// The compressed entry of each run of RUN tokens, at its last token; zeros at other tokens.  An entry is the sum of the
// run's values, each channel weighted by the softmax of its gates plus the biases [RUN, SERIES * KEY_DIM].  rows:
// halves [pages, 2 * SERIES, PAGE, HEAD]; the last SERIES are gates.  With two series, the sum uses the first series of
// the previous run, if it exists, and the second series of the current run.
//
// Grid: (tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    compress(const int* __restrict__ header, const int* __restrict__ starts, const int* __restrict__ block_tables,
             int block_stride, const int* __restrict__ positions, const uint16_t* __restrict__ rows,
             const float* __restrict__ biases, int biases_stride, float* __restrict__ out, int out_stride) {
  const int token = blockIdx.x;
  if (token >= header[N_TOKENS]) return;
  const int position = positions[token], first = max(0, position + 1 - RUN * SERIES);
  const int* const table = table_of(token, starts, block_tables, block_stride);
  for (int column = threadIdx.x; column < KEY_DIM; column += THREADS) {
    float top = -1e30f, total = 0.0f, sum = 0.0f;
    for (int turn = 0; turn < 2 && position % RUN == RUN - 1; turn++) {
      for (int p = first; p <= position; p++) {
        const int series = p <= position - RUN ? 0 : SERIES - 1;
        const uint16_t* const row =
          rows + (((size_t)table[p / PAGE] * 2 * SERIES + series) * PAGE + p % PAGE) * KEY_HEAD + column;
        const float gate =
          half_to_float(row[SERIES * PAGE * KEY_HEAD]) + biases[p % RUN * biases_stride + series * KEY_DIM + column];
        if (turn == 0) {
          top = fmaxf(top, gate);
        } else {
          const float weight = expf(gate - top);
          total += weight;
          sum = fmaf(half_to_float(*row), weight, sum);
        }
      }
    }
    out[(size_t)token * out_stride + column] = total > 0.0f ? sum / total : 0.0f;
  }
}
#elif defined(HEADS)
constexpr int CHOICES = LAST ? HEADS : 1, WIDTH = TOP * RUN + (LAST ? 0 : RUN - 1);

// The number of runs that can be selected among the seen positions, or among their entries in the cache.
DEVICE int runs_of(int seen) { return (seen + (LAST ? RUN - 1 : 0)) / RUN; }

// The key of each run that ends with a token of the batch.  Each channel is the sum of the tokens' keys times the
// softmax of their gates plus the pool's weights [RUN, stride].  A cached token contains [key | gate | key of a run].
// Grid: (tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    pool_keys(const int* __restrict__ header, const int* __restrict__ positions, const int* __restrict__ slots,
              const float* __restrict__ pool, int stride, uint16_t* keys) {
  const int token = blockIdx.x;
  if (token >= header[N_TOKENS] || positions[token] % RUN != RUN - 1) return;
  uint16_t* const first = keys + (size_t)(slots[token] - RUN + 1) * KEY_HEAD;  // with one head, pages are contiguous
  for (int column = threadIdx.x; column < DIM; column += THREADS) {
    float top = -1e30f, total = 0.0f, key = 0.0f;
    for (int i = 0; i < RUN; i++)
      top = fmaxf(top, half_to_float(first[(size_t)i * KEY_HEAD + DIM + column]) + pool[i * stride + column]);
    for (int i = 0; i < RUN; i++) {
      const float gate = half_to_float(first[(size_t)i * KEY_HEAD + DIM + column]) + pool[i * stride + column];
      const float weight = expf(gate - top);
      total += weight;
      key = fmaf(half_to_float(first[(size_t)i * KEY_HEAD + column]), weight, key);
    }
    first[(size_t)(RUN - 1) * KEY_HEAD + RUN_KEY + column] = float_to_half(key / total);
  }
}

// Scores of all runs that tokens see, starting with token number `first`: the sum over the heads of weight * max(0, q *
// key), with weights of 1 if null; or with LAST, the largest q * key per head and run, each computed by a warp.
//
// Grid: (blocks that share a token's runs, tokens).  scores: [tokens, CHOICES, stride].
extern "C" __global__ void __launch_bounds__(THREADS)
    index_scores(const int* __restrict__ header, const int* __restrict__ starts, const int* __restrict__ block_tables,
                 int block_stride, const int* __restrict__ positions, int first, const float* __restrict__ q,
                 int q_stride, const float* __restrict__ weights, int weights_stride,
                 const uint8_t* __restrict__ keys, const uint16_t* __restrict__ key_scales, float* __restrict__ scores,
                 int stride) {
  __shared__ float queries[HEADS * DIM], factors[HEADS];
  const int token = first + blockIdx.y;
  if (token >= header[N_TOKENS]) return;
  const int n = runs_of((positions[token] + 1) / STRIDE);
  if (n <= TOP) return;
  for (int i = threadIdx.x; i < HEADS * DIM; i += THREADS) queries[i] = q[(size_t)token * q_stride + i];
  for (int i = threadIdx.x; i < HEADS; i += THREADS)
    factors[i] = weights ? weights[(size_t)token * weights_stride + i] : 1.0f;
  __syncthreads();
  const int* const table = table_of(token, starts, block_tables, block_stride);
  scores += (size_t)blockIdx.y * CHOICES * stride;
  if (LAST) {
    const int warps = THREADS / WARP, lane = threadIdx.x % WARP;
    for (int p = blockIdx.x * warps + threadIdx.x / WARP; p < n - LAST; p += gridDim.x * warps) {
      float best[HEADS];
      for (int head = 0; head < HEADS; head++) best[head] = -3e38f;
      for (int i = lane; i < RUN; i += WARP) {
        const Key key(keys, key_scales, table, RUN * p + i, 0);
        for (int head = 0; head < HEADS; head++) {
          float product = 0.0f;
          for (int j = 0; j < DIM; j++) product = fmaf(queries[head * DIM + j], key[j], product);
          best[head] = fmaxf(best[head], product);
        }
      }
      for (int head = 0; head < HEADS; head++) {
        const float score = warp_max(best[head]);
        if (lane == 0) scores[head * stride + p] = score + 0.0f;  // -0 becomes 0
      }
    }
    return;
  }
  for (int p = blockIdx.x * THREADS + threadIdx.x; p < n; p += gridDim.x * THREADS) {
    const Key key(keys, key_scales, table, STRIDE * RUN * (p + 1) - 1);
    float total = 0.0f;
    for (int head = 0; head < HEADS; head++) {
      float product = 0.0f;
      for (int i = 0; i < DIM; i++) product = fmaf(queries[head * DIM + i], key[RUN_KEY + i], product);
      total = fmaf(fmaxf(product, 0.0f), factors[head], total);
    }
    scores[p] = total + 0.0f;
  }
}

// The bits of a float as an integer in the order of the floats.
DEVICE uint32_t ordered(float x) {
  const uint32_t bits = (uint32_t)__float_as_int(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The rank of a run's score; the last runs rank above all others.
DEVICE uint32_t rank_of(const float* scores, int i, int n) { return ordered(i < n - LAST ? scores[i] : 3e38f); }

// The positions of the runs with the TOP largest scores, in order, and the positions after the last whole run; then -1.
//
// Found by radix select, from the highest digit to the lowest; among equal scores the first ones are selected.
// Grid: (tokens from number `first` on, CHOICES).  out: [tokens, CHOICES, WIDTH].
extern "C" __global__ void __launch_bounds__(THREADS)
    index_select(const int* __restrict__ header, const int* __restrict__ positions, int first,
                 const float* __restrict__ scores, int stride, float* __restrict__ out, int out_stride) {
  __shared__ int counts[DIGITS], above_of[THREADS], equal_of[THREADS];
  __shared__ uint32_t found;
  __shared__ int wanted;
  const int token = first + blockIdx.x;
  if (token >= header[N_TOKENS]) return;
  const int seen = (positions[token] + 1) / STRIDE, n = runs_of(seen), chosen = min(n, TOP) * RUN;
  out += (size_t)token * out_stride + blockIdx.y * WIDTH;
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
    const int position = n * RUN - chosen + i;
    if (n <= TOP || i >= chosen) out[i] = position < seen ? (float)position : -1.0f;
  }
  if (n <= TOP) return;
  scores += ((size_t)blockIdx.x * CHOICES + blockIdx.y) * stride;
  if (threadIdx.x == 0) found = 0, wanted = TOP;
  for (int above = 32; above > 0; above = max(0, above - DIGIT)) {
    const int shift = max(0, above - DIGIT), last = (1 << (above - shift)) - 1;
    for (int i = threadIdx.x; i <= last; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const uint32_t bits = rank_of(scores, i, n);
      if (above == 32 || bits >> above == found) atomicAdd(counts + (bits >> shift & last), 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = last;
      for (; counts[digit] < wanted; digit--) wanted -= counts[digit];
      found = (above == 32 ? 0 : found << (above - shift)) | digit;
    }
    __syncthreads();
  }
  // Each thread has consecutive runs: the counts of previous threads give the position of its output.
  const int each = (n + THREADS - 1) / THREADS, begin = each * threadIdx.x, end = min(n, begin + each);
  int above = 0, equal = 0;
  for (int i = begin; i < end; i++) {
    const uint32_t bits = rank_of(scores, i, n);
    above += bits > found;
    equal += bits == found;
  }
  above_of[threadIdx.x] = above;
  equal_of[threadIdx.x] = equal;
  __syncthreads();
  above = equal = 0;
  for (int i = 0; i < threadIdx.x; i++) above += above_of[i], equal += equal_of[i];
  for (int i = begin; i < end; i++) {
    const uint32_t bits = rank_of(scores, i, n);
    if (bits > found || (bits == found && equal < wanted))
      for (int j = 0; j < RUN; j++) {
        const int position = i * RUN + j;
        out[(above + min(equal, wanted)) * RUN + j] = position < seen ? (float)position : -1.0f;
      }
    above += bits > found;
    equal += bits == found;
  }
}
#else
using Value = Entry<VALUES_IN_KEYS ? KEY_HEAD : VALUE_HEAD, VALUES_IN_KEYS ? KEY_BITS : VALUE_BITS>;

// Attention of each query head to the selected positions, [T, TOP] or with BY_HEAD [T, KV_HEADS, TOP]; with
// VALUES_IN_KEYS, the values are the first VALUE_DIM values of the keys.
//
// With ENTRIES, attention to the positions of a window, followed by entries of a second cache: all or the selected
// ones.
// Grid: (heads, tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_selected(const int* __restrict__ header, const int* __restrict__ starts,
                       const int* __restrict__ block_tables, int block_stride, const int* __restrict__ positions,
                       const float* __restrict__ selected, int selected_stride, const uint8_t* __restrict__ keys,
                       const uint16_t* __restrict__ key_scales,
                       const uint8_t* __restrict__ values, const uint16_t* __restrict__ value_scales,
                       const float* __restrict__ q, int q_stride, float* __restrict__ out, int out_stride,
                       const float* __restrict__ sinks, float scale, int window,
                       const uint8_t* __restrict__ entries, const int* __restrict__ entry_tables) {
  constexpr int OWN = (VALUE_DIM + THREADS - 1) / THREADS;
  __shared__ float query[KEY_DIM], weights[THREADS], parts[THREADS / WARP];
  __shared__ int chosen[THREADS];
  const int head = blockIdx.x, token = blockIdx.y, own = threadIdx.x, of_keys = head / (gridDim.x / KV_HEADS);
  if (token >= header[N_TOKENS]) return;
  const int seen = positions[token] + 1, n_window = ENTRIES ? min(seen, window) : 0;
  int n = ENTRIES ? seen / max(ENTRIES, 1) : seen;
  if (VALUES_IN_KEYS) values = keys, value_scales = key_scales;
  if (selected) {
    selected += (size_t)token * selected_stride + (BY_HEAD ? of_keys * TOP : 0);
    n = min(n, TOP);
    while (n > 0 && selected[n - 1] < 0.0f) n--;
  }
  n += n_window;
  const int* const table = table_of(token, starts, block_tables, block_stride);
  const int* const entry_table = ENTRIES ? table_of(token, starts, entry_tables, block_stride) : table;
  // A position's number, or ~number of an entry.
  const auto key_at = [&](int number) {
    return ENTRIES && number < 0 ? Key(entries, key_scales, entry_table, ENTRIES * -number - 1, 0, max(ENTRIES, 1))
                                 : Key(keys, key_scales, table, number, of_keys);
  };
  const auto value_at = [&](int number) {
    return ENTRIES && number < 0 ? Value(entries, key_scales, entry_table, ENTRIES * -number - 1, 0, max(ENTRIES, 1))
                                 : Value(values, value_scales, table, number, of_keys);
  };
  for (int i = own; i < KEY_DIM; i += THREADS) query[i] = q[(size_t)token * q_stride + head * KEY_DIM + i];
  float sums[OWN] = {}, largest = sinks ? sinks[head] : -1e30f, total = sinks ? 1.0f : 0.0f;
  for (int begin = 0; begin < n; begin += THREADS) {
    const int here = min(n - begin, THREADS);
    __syncthreads();
    float score = -3e38f;
    if (own < here) {
      const int i = begin + own - n_window, number = i >= 0 && selected ? (int)selected[i] : i;
      chosen[own] = !ENTRIES ? number : i < 0 ? seen + i : ~number;
      const Key key = key_at(chosen[own]);
      float product = 0.0f;
      for (int i = 0; i < KEY_DIM; i++) product = fmaf(query[i], key[i], product);
      score = product * scale;
    }
    const float top = warp_max(score);
    if (own % WARP == 0) parts[own / WARP] = top;
    __syncthreads();
    float next = largest;
    for (int i = 0; i < THREADS / WARP; i++) next = fmaxf(next, parts[i]);
    weights[own] = own < here ? expf(score - next) : 0.0f;
    const float keep = expf(largest - next);
    largest = next;
    __syncthreads();
    total *= keep;
    for (int i = 0; i < here; i++) total += weights[i];
    for (int j = 0; j < OWN; j++) {
      const int column = j * THREADS + own;
      sums[j] *= keep;
      if (column < VALUE_DIM)
        for (int i = 0; i < here; i++) sums[j] = fmaf(weights[i], value_at(chosen[i])[column], sums[j]);
    }
  }
  for (int j = 0; j < OWN; j++)
    if (j * THREADS + own < VALUE_DIM)
      out[(size_t)token * out_stride + head * VALUE_DIM + j * THREADS + own] = sums[j] / total;
}
#endif
