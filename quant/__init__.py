"""Block formats of GGUF tensors: decoding, encoding and the layouts that kernels read.  numpy only."""
