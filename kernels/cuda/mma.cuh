// Tensor cores, and copies to shared memory that overlap with arithmetic.
//
// Fragments: with g = lane / 4 and t = lane % 4, registers of A contain rows g and g + 8, registers of B column g:
// words t of 16 bytes along K, in order.  Accumulators contain rows g, g, g + 8, g + 8 and columns 2 t, 2 t + 1, 2 t, 2
// t + 1.
// Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
#pragma once
#include "common.cuh"

DEVICE uint32_t shared_address(const void* place) { return (uint32_t)__cvta_generic_to_shared(place); }

// Loads four matrices of 8 rows of 16 bytes; lane 8 i + j passes the address of row j of matrix i, and gets word t of
// row g of each matrix.
DEVICE void load_matrices(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

// Loads two matrices; lanes 0 ... 15 pass the addresses.
DEVICE void load_matrices(uint32_t (&words)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(shared_address(row))
               : "memory");
}

// Loads four matrices of 8 x 8 halves like load_matrices, but transposed: rows 2 t and 2 t + 1 of column g.
DEVICE void load_transposed(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

#if __CUDA_ARCH__ >= 800

// c + A [16, 32] times B [32, 8], of signed bytes.
DEVICE int4 mma_k32(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int c) {
  int4 d;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
  return d;
}

// c + A [16, 16] times B [16, 8], of signed bytes.
DEVICE int4 mma_k16(uint32_t a0, uint32_t a1, uint32_t b, int c) {
  int4 d;
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
      : "r"(a0), "r"(a1), "r"(b), "r"(c));
  return d;
}

#define MMA_FLOATS(name, type)                                                                                  \
  /* acc += A [16, 16] times B [16, 8]. */                                                                      \
  DEVICE void name(float (&acc)[4], const uint4& a, uint32_t b0, uint32_t b1) {                                 \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                                  \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                  \
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                                                \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));                                            \
  }
MMA_FLOATS(mma_f16, "f16")
MMA_FLOATS(mma_bf16, "bf16")

// Copies 16 bytes of global memory, bypassing the first-level cache.
DEVICE void copy16_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of the committed groups are in flight.
template <int N>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// sm_75 multiplies fragments with half as many columns, has no bfloat16 or integer fragments of our sizes, and copies
// synchronously.
#else

DEVICE void mma_k8(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(b));
}

DEVICE void mma_f16(float (&acc)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  mma_k8(acc, a.x, a.y, b0);
  mma_k8(acc, a.z, a.w, b1);
}

DEVICE void commit_copies() {}

template <int N>
DEVICE void wait_for_copies() {}

#endif
