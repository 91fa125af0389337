// Kernels for the tests of drivers: small, and each with another kind of argument.
#include "numbers.cuh"

// x[i] = x[i] * factor + offset
extern "C" __global__ void scale_and_add(float* x, int n, float factor, float offset) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * factor + offset;
}

// to[i] = from[i] + STEP
extern "C" __global__ void add_step(const float* from, float* to, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i] + (float)STEP;
}

// to[i] = from[n - 1 - i], through n floats of dynamic shared memory; one block.
extern "C" __global__ void reverse(const float* from, float* to, int n) {
  extern __shared__ float shared[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) shared[i] = from[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = shared[n - 1 - i];
}
