// How kernels see a batch: a header of int32 in device memory, so that a captured launch serves every batch.
#pragma once

// Places in the header.
enum { N_TOKENS, N_OUTPUTS, N_SEQUENCES };
