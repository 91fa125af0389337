// Measures the limits of a device: kernels that only read, and kernels that only multiply (roofline.py).
//
// Each kernel stores sums of everything that it has read or multiplied, so that the compiler omits nothing, and tests
// can check the result.
#include "mma.cuh"

#define THREADS 256
#define WARPS (THREADS / WARP)
#define LOADS 4    // 16-byte loads in flight per thread
#define CHAINS 8   // independent products of a warp
#define PERIOD 4   // right operands used in turn

DEVICE uint32_t sum_of(uint4 v) { return v.x + v.y + v.z + v.w; }

// Sums of 32-bit words modulo 2^32, one per warp.  n: units of 16 bytes.  Grid: enough blocks to keep the device busy.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_words(const uint4* __restrict__ data, int64_t n, uint32_t* __restrict__ sums) {
  const int64_t step = (int64_t)gridDim.x * THREADS * LOADS;
  uint32_t total = 0;
  for (int64_t i = (int64_t)blockIdx.x * THREADS * LOADS + threadIdx.x; i < n; i += step) {
    uint4 v[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
      v[k] = i + k * THREADS < n ? data[i + k * THREADS] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < LOADS; k++) total += sum_of(v[k]);
  }
  total = warp_sum(total);
  if (threadIdx.x % WARP == 0) sums[blockIdx.x * WARPS + threadIdx.x / WARP] = total;
}

// The operands of a warp: CHAINS left operands of four words per lane, then PERIOD right operands of two words, by
// lane.
struct Operands {
  uint4 left[CHAINS];
  uint2 right[PERIOD];
};

DEVICE Operands load_operands(const uint32_t* words) {
  Operands o;
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int c = 0; c < CHAINS; c++) o.left[c] = ((const uint4*)words)[c * WARP + lane];
#pragma unroll
  for (int p = 0; p < PERIOD; p++) o.right[p] = ((const uint2*)(words + CHAINS * WARP * 4))[p * WARP + lane];
  return o;
}

// acc += A times B, signed bytes: [16, 32] times [32, 8], or without such tensor cores the words of each lane.
DEVICE void multiply_add(int (&acc)[4], uint4 a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else
  acc[0] = __dp4a((int)a.x, (int)b0, acc[0]);
  acc[1] = __dp4a((int)a.y, (int)b0, acc[1]);
  acc[2] = __dp4a((int)a.z, (int)b1, acc[2]);
  acc[3] = __dp4a((int)a.w, (int)b1, acc[3]);
#endif
}

// Products of all left operands with each right operand in turn, `rounds` times; one sum per warp, for bytes modulo
// 2^32.
#define MULTIPLY(name, T, SUM, mma)                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
      name(const uint32_t* __restrict__ words, int rounds, SUM* __restrict__ sums) {                     \
    const Operands o = load_operands(words);                                                             \
    T acc[CHAINS][4] = {};                                                                               \
    for (int i = 0; i < rounds; i++) {                                                                   \
      _Pragma("unroll") for (int p = 0; p < PERIOD; p++) {                                               \
        _Pragma("unroll") for (int c = 0; c < CHAINS; c++) mma(acc[c], o.left[c], o.right[p].x, o.right[p].y); \
      }                                                                                                  \
    }                                                                                                    \
    SUM total = 0;                                                                                       \
    _Pragma("unroll") for (int c = 0; c < CHAINS; c++)                                                   \
      total += (SUM)acc[c][0] + (SUM)acc[c][1] + (SUM)acc[c][2] + (SUM)acc[c][3];                        \
    total = warp_sum(total);                                                                             \
    if (threadIdx.x % WARP == 0) sums[blockIdx.x * WARPS + threadIdx.x / WARP] = total;                  \
  }
MULTIPLY(multiply_int8, int, uint32_t, multiply_add)
MULTIPLY(multiply_f16, float, float, mma_f16)
#if __CUDA_ARCH__ >= 800
MULTIPLY(multiply_bf16, float, float, mma_bf16)
#endif
