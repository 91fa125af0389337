// The batch and the cache (cache.py) as kernels read them.
#pragma once

// Indices in the batch's header, int32 in device memory, so that a captured launch serves every batch.
// The last number is written by experts.cu.
enum { N_TOKENS, N_OUTPUTS, N_SEQUENCES, N_PLACES };

// Ids of tokens with separate embeddings are the embeddings' numbers, counted from the lowest id.
constexpr int EMBEDDED_IDS = -2147483647 - 1;
__device__ __forceinline__ bool is_embedded(int id) { return id < EMBEDDED_IDS / 2; }
__device__ __forceinline__ int embedding_number(int id) { return id - EMBEDDED_IDS; }

constexpr int PAGE = 64;       // tokens in a page of the cache
constexpr int PER_SCALE = 32;  // values of a head that share a scale, if the cache has scales
