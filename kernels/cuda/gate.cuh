// The activation functions of gates, and the output of products that end with a gate.
#pragma once
#include "activations.cuh"

// In the order of ACTIVATIONS in operations/dense.py.
enum { SILU, GELU, GELU_ERF, GELU_QUICK, RELU, RELU2, TANH, SIGMOID, IDENTITY, CLAMPED_SWIGLU, SOFTPLUS };

DEVICE float activated(int kind, float g, float u) {
  switch (kind) {
    case SILU:
      return g / (1.0f + expf(-g)) * u;
    case GELU:  // the tanh form: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
      return g / (1.0f + expf(-1.5957691216057308f * fmaf(0.044715f * g * g, g, g))) * u;
    case GELU_ERF:
      return 0.5f * g * erfcf(-0.70710678f * g) * u;
    case GELU_QUICK:
      return g / (1.0f + expf(-1.702f * g)) * u;
    case RELU:
      return g > 0.0f ? g * u : g != g ? g : 0.0f;
    case RELU2:
      return g > 0.0f ? g * g * u : g != g ? g : 0.0f;
    case TANH:
      return tanhf(g) * u;
    case SIGMOID:
      return u / (1.0f + expf(-g));
    case IDENTITY:
      return g * u;
    case SOFTPLUS:
      return softplus(g) * u;
    default:  // gpt-oss's
      g = fminf(g, 7.0f);
      u = fmaxf(fminf(u, 7.0f), -7.0f);
      return g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
  }
}

// A gate over the results of two products, and the buffers of its codes.
struct Gate {
  int kind;
  const float *gate_bias, *up_bias;  // or null
  int8_t* units;
  float2* scales;
  int n_rows;  // rows of the codes' layout

  // Stores a row's block of 32 columns, one per lane of a warp.
  __device__ __forceinline__ void store(float g, float u, int block, int row) const {
    const int column = BLOCK * block + threadIdx.x % WARP;
    if (gate_bias) g += gate_bias[column];
    if (up_bias) u += up_bias[column];
    store_code(activated(kind, g, u), units, scales, block, row, n_rows);
  }
};

// The weights of both products, and a Gate, as parameters of a kernel.
#define GATE_PARAMETERS                                                                                             \
  const uint8_t *__restrict__ gates, const float *__restrict__ gate_bias, const uint8_t *__restrict__ ups,           \
      const float *__restrict__ up_bias, int kind, int8_t *__restrict__ gated, float2 *__restrict__ gated_scales,    \
      int gated_rows
#define GATE \
  Gate { kind, gate_bias, up_bias, gated, gated_scales, gated_rows }
