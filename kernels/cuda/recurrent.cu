// Operations with recurrent states: updates of a sequence's state by its tokens, and reads of the state.
//
// A sequence's states are stored in the slot given by the batch, `slot_floats` values per slot, and are zero before
// position 0, regardless of the slot's content.  Threads iterate over the tokens of a sequence with their part of the
// state in registers.  The state is read and written once per step, and a token's bits do not depend on the division
// into steps.  In a prompt, a token takes a block the time of about 250 instructions of a warp; 48 heads keep 192
// blocks busy.
#include "batch.cuh"
#include "common.cuh"

#ifdef STATES
// For each token and channel: h_i = exp(a_i step) h_i + b_i step x; out = sum over i of c_i h_i + d x, where step =
// softplus(dt + dt_bias).
//
// Grid: (blocks of 128 channels, sequences at once); a thread has a channel.  states: [STATES, n] of a slot.
// a: [STATES, x_stride].
extern "C" __global__ void __launch_bounds__(128)
    channel_scan(const int* __restrict__ header, const int* __restrict__ starts, const int* __restrict__ positions,
                 const int* __restrict__ slots, float* __restrict__ states, int64_t slot_floats,
                 const float* __restrict__ x, int x_stride, const float* __restrict__ dt, int dt_stride,
                 const float* __restrict__ b, int b_stride, const float* __restrict__ c, int c_stride,
                 const float* __restrict__ a, const float* __restrict__ dt_bias, const float* __restrict__ d, int n,
                 float* __restrict__ out, int out_stride) {
  const int channel = blockIdx.x * 128 + threadIdx.x;
  if (channel >= n) return;
  for (int sequence = blockIdx.y; sequence < header[N_SEQUENCES]; sequence += gridDim.y) {
    const int start = starts[sequence], stop = starts[sequence + 1];
    float* state = states + slots[sequence] * slot_floats + channel;
    const bool goes_on = positions[start] > 0;
    float h[STATES];
    for (int i = 0; i < STATES; i++) h[i] = goes_on ? state[(size_t)i * n] : 0.0f;
    for (int token = start; token < stop; token++) {
      const float step = softplus(dt[(size_t)token * dt_stride + channel] + dt_bias[channel]);
      const float value = x[(size_t)token * x_stride + channel];
      float total = value * d[channel];
      for (int i = 0; i < STATES; i++) {
        const float decay = expf(a[(size_t)i * x_stride + channel] * step);
        h[i] = fmaf(h[i], decay, value * step * b[(size_t)token * b_stride + i]);
        total = fmaf(h[i], c[(size_t)token * c_stride + i], total);
      }
      out[(size_t)token * out_stride + channel] = total;
    }
    for (int i = 0; i < STATES; i++) state[(size_t)i * n] = h[i];
  }
}
#elif defined(RATE)
constexpr int LANES = 4, THREADS = LANES * COLUMNS, OWN = ROWS / LANES;

// Values of a token that all columns of a head use; removed: -kappa * a, before kappa is divided by its length.
struct __align__(16) Token {
  float decay[ROWS], key[ROWS], query[ROWS], kappa[RATE ? ROWS : 4], removed[RATE ? ROWS : 4], bonus[BONUS ? ROWS : 4];
};

DEVICE float sum_of_lanes(float x) {
  x += __shfl_xor_sync(FULL_MASK, x, 1);
  return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

// RWKV's recurrence, see kernels/operations/recurrent.py.  RATE, BONUS: whether these arguments are given.
//
// Grid: (blocks of COLUMNS columns of the v of all heads, sequences at once); four lanes share a column, and each has
// every fourth group of four rows.  columns: columns per head.  states: [blocks, OWN, THREADS] of a slot.
extern "C" __global__ void __launch_bounds__(THREADS)
    wkv(const int* __restrict__ header, const int* __restrict__ starts, const int* __restrict__ positions,
        const int* __restrict__ slots, float* __restrict__ states, int64_t slot_floats, const float* __restrict__ r,
        int r_stride, const float* __restrict__ k, int k_stride, const float* __restrict__ v, int v_stride,
        const float* __restrict__ decay, int decay_stride, const float* __restrict__ rate, int rate_stride,
        const float* __restrict__ key_scale, const float* __restrict__ key_rate, const float* __restrict__ bonus,
        int columns, float* __restrict__ out, int out_stride, float* __restrict__ of_bonus) {
  __shared__ Token tokens[2];
  const int column = blockIdx.x * COLUMNS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int first = ROWS * (blockIdx.x * COLUMNS / columns);
  int turn = 0;
  for (int sequence = blockIdx.y; sequence < header[N_SEQUENCES]; sequence += gridDim.y) {
    const int start = starts[sequence], stop = starts[sequence + 1];
    float* state = states + slots[sequence] * slot_floats + (size_t)blockIdx.x * (OWN * THREADS) + threadIdx.x;
    const bool goes_on = positions[start] > 0;
    float s[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) s[i] = goes_on ? state[i * THREADS] : 0.0f;
    for (int token = start; token < stop; token++) {
      turn ^= 1;
      Token& now = tokens[turn];
      for (int i = threadIdx.x; i < ROWS; i += THREADS) {
        const int channel = first + i;
        const float step = decay[(size_t)token * decay_stride + channel];
        const float query = r[(size_t)token * r_stride + channel];
        float key = k[(size_t)token * k_stride + channel], factor;
        if (RATE) {
          factor = expf(sigmoid(step) * -0.60653066f);  // -1 / sqrt(e)
          const float a = sigmoid(rate[(size_t)token * rate_stride + channel]), kappa = key * key_scale[channel];
          key = fmaf((a - 1.0f) * key_rate[channel], key, key);
          now.kappa[i] = kappa, now.removed[i] = -kappa * a;
        } else {
          factor = expf(-expf(step));
          if (!BONUS) key -= key * factor;
        }
        now.decay[i] = factor, now.key[i] = key, now.query[i] = query;
        if (BONUS) now.bonus[i] = query * key * bonus[channel];
      }
      const float value = v[(size_t)token * v_stride + column];
      __syncthreads();  // all have finished the previous token, so its buffer can be reused: two are enough
      float known = 0.0f, squares = 0.0f, total = 0.0f, y = 0.0f;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int row = LANES * (i & ~3) + 4 * lane + (i & 3);
        if (RATE) known = fmaf(s[i], now.kappa[row], known), squares = fmaf(now.kappa[row], now.kappa[row], squares);
        if (BONUS) total += now.bonus[row];
      }
      if (RATE) known = sum_of_lanes(known) / fmaxf(sum_of_lanes(squares), 1e-24f);
      if (BONUS) total = sum_of_lanes(total);
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int row = LANES * (i & ~3) + 4 * lane + (i & 3);
        if (BONUS && !RATE) y = fmaf(s[i], now.query[row], y);
        s[i] *= now.decay[row];
        if (RATE) s[i] = fmaf(now.removed[row], known, s[i]);
        s[i] = fmaf(now.key[row], value, s[i]);
        if (RATE || !BONUS) y = fmaf(s[i], now.query[row], y);
      }
      y = sum_of_lanes(y);
      if (lane == 0) {
        out[(size_t)token * out_stride + column] = y;
        if (BONUS) of_bonus[(size_t)token * out_stride + column] = value * total;
      }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) state[i * THREADS] = s[i];
  }
}
#else
constexpr int LANES = 4, THREADS = LANES * COLUMNS, OWN = ROWS / LANES;

// Values of a token that all columns of a head use.
struct __align__(16) Token {
  float key[ROWS], query[ROWS], decay[PER_CHANNEL ? ROWS : 4];
};

DEVICE float sum_of_lanes(float x) {
  x += __shfl_xor_sync(FULL_MASK, x, 1);
  return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

// The decay factor of a state: exp(a * softplus(step)), or with a bound exp(bound * sigmoid(a * step)).
DEVICE float decay_of(float step, float a, float bound) {
  return expf(bound != 0.0f ? bound * sigmoid(a * step) : softplus(step) * a);
}

// For each token and head: S = decay * S + k (x) new; out = S^T q, where decay is decay_of(step + dt_bias, a, bound).
//
// With DELTA, q and k are divided by their lengths, q is also multiplied by `scale`, and new = sigmoid(beta) * (v -
// decay * S^T k); steps are [T, H] or, with PER_CHANNEL, [T, H, ROWS].  Without DELTA, new = softplus(step + dt_bias) *
// v, and d * v is added.
//
// Grid: (blocks of COLUMNS columns of the v of all heads, sequences at once); four lanes share a column, and each has
// every fourth group of four rows.  columns: columns per head.  states: [blocks, OWN, THREADS] of a slot.  q, k: [T,
// n_groups, ROWS]; head h uses group h / per_group or, if per_group is 0, group h % n_groups.
extern "C" __global__ void __launch_bounds__(THREADS)
    recurrence(const int* __restrict__ header, const int* __restrict__ starts, const int* __restrict__ positions,
               const int* __restrict__ slots, float* __restrict__ states, int64_t slot_floats,
               const float* __restrict__ q, int q_stride, const float* __restrict__ k, int k_stride,
               const float* __restrict__ v, int v_stride, const float* __restrict__ steps, int steps_stride,
               const float* __restrict__ betas, int betas_stride, const float* __restrict__ a,
               const float* __restrict__ dt_bias, const float* __restrict__ d, int n_groups, int per_group,
               int columns, float eps, float scale, float bound, float* __restrict__ out, int out_stride) {
  __shared__ Token tokens[2];
  const int column = blockIdx.x * COLUMNS + threadIdx.x / LANES, head = blockIdx.x * COLUMNS / columns;
  const int group = per_group ? head / per_group : head % n_groups, lane = threadIdx.x % LANES;
  const float factor = bound != 0.0f ? fabsf(a[head]) : a[head];
  int turn = 0;
  for (int sequence = blockIdx.y; sequence < header[N_SEQUENCES]; sequence += gridDim.y) {
    const int start = starts[sequence], stop = starts[sequence + 1];
    float* state = states + slots[sequence] * slot_floats + (size_t)blockIdx.x * (OWN * THREADS) + threadIdx.x;
    const bool goes_on = positions[start] > 0;
    float s[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) s[i] = goes_on ? state[i * THREADS] : 0.0f;
    for (int token = start; token < stop; token++) {
      turn ^= 1;
      Token& now = tokens[turn];
      for (int i = threadIdx.x; i < ROWS; i += THREADS) {
        now.key[i] = k[(size_t)token * k_stride + ROWS * group + i];
        now.query[i] = q[(size_t)token * q_stride + ROWS * group + i];
        if (PER_CHANNEL) {
          const int channel = ROWS * head + i;
          now.decay[i] = decay_of(steps[(size_t)token * steps_stride + channel] + dt_bias[channel], factor, bound);
        }
      }
      float step = 1.0f, decay = 1.0f;
      if (!PER_CHANNEL) {
        const float total = steps[(size_t)token * steps_stride + head] + dt_bias[head];
        step = softplus(total), decay = decay_of(total, factor, bound);
      }
      const float value = v[(size_t)token * v_stride + column];
      const float beta = DELTA ? sigmoid(betas[(size_t)token * betas_stride + head]) : 0.0f;
      __syncthreads();  // all have finished the previous token, so its buffer can be reused: two are enough
      float of_key = 0.0f, of_query = 0.0f, both = 0.0f, keys = 0.0f, queries = 0.0f;
#pragma unroll
      for (int i = 0; i < OWN; i += 4) {
        const int row = LANES * i + 4 * lane;
        const float4 key = *(const float4*)(now.key + row), query = *(const float4*)(now.query + row);
        if (PER_CHANNEL) {
          const float4 decays = *(const float4*)(now.decay + row);
          s[i] *= decays.x, s[i + 1] *= decays.y, s[i + 2] *= decays.z, s[i + 3] *= decays.w;
        } else {
          s[i] *= decay, s[i + 1] *= decay, s[i + 2] *= decay, s[i + 3] *= decay;
        }
        of_key = fmaf(s[i], key.x, fmaf(s[i + 1], key.y, fmaf(s[i + 2], key.z, fmaf(s[i + 3], key.w, of_key))));
        of_query =
            fmaf(s[i], query.x, fmaf(s[i + 1], query.y, fmaf(s[i + 2], query.z, fmaf(s[i + 3], query.w, of_query))));
        both = fmaf(key.x, query.x, fmaf(key.y, query.y, fmaf(key.z, query.z, fmaf(key.w, query.w, both))));
        keys = fmaf(key.x, key.x, fmaf(key.y, key.y, fmaf(key.z, key.z, fmaf(key.w, key.w, keys))));
        queries =
            fmaf(query.x, query.x, fmaf(query.y, query.y, fmaf(query.z, query.z, fmaf(query.w, query.w, queries))));
      }
      of_query = sum_of_lanes(of_query), both = sum_of_lanes(both);
      float added = step * value, y;
      if (DELTA) {
        const float k_length = 1.0f / sqrtf(sum_of_lanes(keys) + eps);
        const float q_length = scale / sqrtf(sum_of_lanes(queries) + eps);
        added = beta * (value - sum_of_lanes(of_key) * k_length) * k_length;
        y = fmaf(added, both, of_query) * q_length;
      } else {
        y = fmaf(d[head], value, fmaf(added, both, of_query));
      }
#pragma unroll
      for (int i = 0; i < OWN; i += 4) {
        const float4 key = *(const float4*)(now.key + LANES * i + 4 * lane);
        s[i] = fmaf(key.x, added, s[i]), s[i + 1] = fmaf(key.y, added, s[i + 1]);
        s[i + 2] = fmaf(key.z, added, s[i + 2]), s[i + 3] = fmaf(key.w, added, s[i + 3]);
      }
      if (lane == 0) out[(size_t)token * out_stride + column] = y;
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) state[i * THREADS] = s[i];
  }
}
#endif
