// What attention.cu and append.cu are written in: conversions, copies to shared memory and products of small matrices,
// each one instruction or two, and how the cache lies in memory (drawn in cache.py).
#pragma once

#include "batch.cuh"
#include "common.cuh"

#define PAGE 64       // tokens in a page of the cache
#define PER_SCALE 32  // values of a head that share a scale, where the cache has scales

// -- float16 ----------------------------------------------------------------------------------------------------------

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

DEVICE uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

DEVICE uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// 2 ** x, within 2 units in the last place; 0 where it would be subnormal.
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

// -- Copies into shared memory ----------------------------------------------------------------------------------------

DEVICE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes, or 16 zeros where `wanted` is false; there when the group that it was committed with has been waited for.
DEVICE void copy_async(void* to, const void* from, bool wanted) {
#if __CUDA_ARCH__ >= 800
  const int n = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n) : "memory");
#else
  *(uint4*)to = wanted ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}

DEVICE void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of copies that this thread committed but the last `PENDING`.
template <int PENDING>
DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// -- Products of matrices ---------------------------------------------------------------------------------------------
// Lane 4 g + t holds, of a 16 x 8 matrix of sums, {row g: columns 2 t, 2 t + 1; row g + 8: the same}.

// Four 8 x 8 matrices of halves; lane 8 i + r gives the address of row r of matrix i, and gets columns 2 t, 2 t + 1 of
// row g of each.
DEVICE void load_matrices(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

// The same, each matrix transposed: rows 2 t, 2 t + 1 of column g.
DEVICE void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

// sums [16, 8] += a [16, 16] @ b [16, 8], halves with float32 sums.
DEVICE void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
