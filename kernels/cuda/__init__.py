"""CUDA kernels: C++ that NVRTC compiles for the local GPU, and a narrow interface to CUDA devices.

A ``.cu`` file is a module (module.py).  A forward pass is built in these steps:

    graph ──lowering.py──▶ calls (calls.py), each with its launches ──step.py──▶ CUDA graphs, one arena of buffers

matmul.py and attention.py choose among kernels of products and of attention, and their launch geometry.

==============================================  ===========================================
kernels                                         tests, in tests/kernels/cuda
==============================================  ===========================================
pack, embed, quantise, matvec*, matmul*         test_pack, _quantise, _matmul
attention, append                               test_attention, test_append
elementwise                                     test_elementwise, _selection
experts                                         test_experts
convolution, recurrent                          tests/kernels/test_recurrent
ceilings                                        test_roofline
==============================================  ===========================================

**To try a change** needs no GPU, but NVRTC and g++ (``pip install -e ".[dev,cuda13]"``).  Edit the ``.cu``, then::

    python -m pytest tests/kernels/cuda/test_elementwise.py         results, and in check mode races and bounds
    python -m pytest tests/kernels/cuda/test_kernel_mutations.py -k rms_norm
    python -m tests.kernels.cuda.traffic rms_norm                   sectors and bank passes of each load and store
    python -m tests.kernels.cuda.registers 80                       registers and spills; --write keeps new budgets
    python -m tests.benchmarks.gpu --sections products,attention    times, on a GPU

A new kernel needs a case in test_kernel_mutations.py, which fails without one.

**To add a format of weights**, give it a layout for the CPU (`localllm.quant.packing.LAYOUTS`, the source
of `matmul.PACKED_FORMATS`, and `localllm.quant.repack.repack_target`), and write its struct: formats.cuh
describes the members, and codes.cuh shows the layout of codes.  Most tests of packing and products, and the register
budgets, iterate over PACKED_FORMATS; ``registers --write`` creates the budgets of a new format.
"""
