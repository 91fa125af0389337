// Functions of attention.cu, in addition to mma.cuh.
#pragma once
#include "batch.cuh"
#include "mma.cuh"

// Two values in a register, the first in its low half.
DEVICE uint32_t to_halves(float first, float second) {
#if __CUDA_ARCH__ >= 800
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
#else
  return float_to_half(first) | (uint32_t)float_to_half(second) << 16;
#endif
}

#define ON_HALVES(name, op)                                           \
  DEVICE uint32_t name(uint32_t a, uint32_t b) {                      \
    uint32_t y;                                                       \
    asm(op ".f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));          \
    return y;                                                         \
  }
ON_HALVES(subtract_halves, "sub")
ON_HALVES(multiply_halves, "mul")

// 2 ** x, within 2 units in the last place; 0 instead of subnormal numbers.
DEVICE float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), within 4 units in the last place.  Near 0, where 1 - 2 / (e^2x + 1) loses digits, it uses the polynomial of
// Cephes' tanhf (Moshier, 1984).  Both are computed, so that threads do not diverge.
DEVICE float tanh_of(float x) {
  const float square = x * x;
  float p = fmaf(-5.70498872745e-3f, square, 2.06390887954e-2f);
  p = fmaf(p, square, -5.37397155531e-2f);
  p = fmaf(p, square, 1.33314422036e-1f);
  p = fmaf(p, square, -3.33332819422e-1f);
  const float far = 1.0f - 2.0f * reciprocal(exp2_of(2.8853900817779268f * x) + 1.0f);
  return fabsf(x) < 0.625f ? fmaf(p * square, x, x) : far;
}

// Copies 16 bytes of global memory, or 16 zeros if they are not wanted.
DEVICE void copy16_or_zeros(void* shared, const void* global, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(wanted ? 16 : 0)
               : "memory");
#else
  *(uint4*)shared = wanted ? *(const uint4*)global : make_uint4(0, 0, 0, 0);
#endif
}
