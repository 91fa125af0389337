// The order of logits: descending, and the lowest id first among equal logits.
#pragma once
#include "common.cuh"

DEVICE float infinity() { return __int_as_float(0x7f800000); }

// Logits and their ids as integers; the largest key is the best: the largest logit, and the lowest id among equals.
// NaN is better than any number, so that it is always noticed.  No key is 0.
DEVICE uint64_t key_of(float logit, int id) {
  const uint32_t bits = logit == 0.0f ? 0u : (uint32_t)__float_as_int(logit);  // -0 equals 0
  const uint32_t rank = logit != logit ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)rank << 32 | (0xFFFFFFFFu - (uint32_t)id);
}

DEVICE int id_of(uint64_t key) { return (int)(0xFFFFFFFFu - (uint32_t)key); }

// The maximum over the 32 lanes of a warp, in all lanes.
DEVICE uint64_t best_of_warp(uint64_t key) {
#pragma unroll
  for (int step = WARP / 2; step; step /= 2) key = max(key, __shfl_xor_sync(FULL_MASK, key, step));
  return key;
}
