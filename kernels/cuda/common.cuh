// Shared by all kernels: integer types, exact conversions, and reductions over a warp.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

#define DEVICE static __device__ __forceinline__

constexpr int WARP = 32;
constexpr uint32_t FULL_MASK = 0xffffffffu;

// Quantisation to eight bits, as in kernels/ops.py: the largest code, and a magnitude that counts as 0.
constexpr float LARGEST_CODE = 127.0f, NEGLIGIBLE = 1e-36f;

// Prefetches the cache line of an address to the first-level cache.
DEVICE void prefetch(const void* place) { asm volatile("prefetch.global.L1 [%0];" ::"l"(place)); }

// Programmatic dependent launch (PTX ISA, griddepcontrol; sm_90), compiled with EARLY and used by launches that request
// it.  No launch here does yet: tests/benchmarks/gpu/early.py compares it.  After `let_next_begin` the next kernel may
// start; after `wait_for_last` the previous kernel has finished, and its writes are visible.
DEVICE void let_next_begin() {
#ifdef EARLY
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void wait_for_last() {
#ifdef EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether a row is outside the batch, whose number of rows is in memory.  Row 0 does not wait for this number: if the
// batch is empty, the memory of row 0 is not used.
DEVICE bool is_beyond(int row, const int* n_rows) { return row > 0 && row >= *n_rows; }

// For large -x, expf is infinite and 1 / infinity is 0, as required.
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// v * factor + more
DEVICE float4 multiply_add(float4 v, float factor, float4 more) {
  return make_float4(fmaf(v.x, factor, more.x), fmaf(v.y, factor, more.y), fmaf(v.z, factor, more.z),
                     fmaf(v.w, factor, more.w));
}

DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEVICE float low_half(uint32_t word) { return half_to_float((uint16_t)word); }

DEVICE float high_half(uint32_t word) { return half_to_float((uint16_t)(word >> 16)); }

DEVICE float bfloat_to_float(uint16_t bits) { return __int_as_float((int)((uint32_t)bits << 16)); }

// The nearest 16-bit float, ties to even; infinite outside its range.
DEVICE uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

DEVICE uint16_t float_to_bfloat(float value) {
  const uint32_t bits = (uint32_t)__float_as_int(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);  // keep NaN
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The sum over the 32 lanes of a warp, in all lanes, with the same bits in each lane; the order is fixed.
template <class T>
DEVICE T warp_sum(T value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(FULL_MASK, value, distance);
  return value;
}

// The maximum over the 32 lanes of a warp, in all lanes; NaN only if all values are NaN.
DEVICE float warp_max(float value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, distance));
  }
  return value;
}

// Rounds 32 columns of a row, one per lane of a warp, to int8, with the bits of `store_codes` (activations.cuh).
DEVICE void store_code(float v, int8_t* units, float2* scales, int block, int row, int n_rows) {
  const int lane = threadIdx.x % WARP;
  int bits = __float_as_int(v) & 0x7fffffff;
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) bits = max(bits, __shfl_xor_sync(FULL_MASK, bits, offset));
  const float largest = __int_as_float(bits);
  const int code = __float2int_rn(v * (largest > NEGLIGIBLE ? LARGEST_CODE / largest : 0.0f)), sum = warp_sum(code);
  units[((int64_t)(2 * block + lane / 16) * n_rows + row) * 16 + lane % 16] = (int8_t)code;
  const float scale = largest / LARGEST_CODE;
  if (lane == 0) scales[(int64_t)block * n_rows + row] = make_float2(scale, scale * sum);
}
