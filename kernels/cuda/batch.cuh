// How kernels see a batch and the cache (cache.py).
#pragma once

// Places in the batch's header, int32 in device memory, so that a captured launch serves every batch.
// The last is what experts.cu writes there.
enum { N_TOKENS, N_OUTPUTS, N_SEQUENCES, N_PLACES };

// Ids of tokens with embeddings of their own count those, from the lowest on.
constexpr int EMBEDDED_IDS = -2147483647 - 1;
__device__ __forceinline__ bool is_embedded(int id) { return id < EMBEDDED_IDS / 2; }
__device__ __forceinline__ int embedding_number(int id) { return id - EMBEDDED_IDS; }

constexpr int PAGE = 64;       // tokens in a page of the cache
constexpr int PER_SCALE = 32;  // values of a head that share a scale, where the cache has scales
