"""CUDA kernels: C++ that NVRTC compiles for the GPU at hand, and the narrow interface to the device beneath them."""
