"""The CPU backend, with kernels compiled by numba and LLVM."""
