"""CPU kernels: Python that numba and LLVM compile for the processor at hand."""
