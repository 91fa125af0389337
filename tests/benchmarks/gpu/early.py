"""Products for few tokens that begin before the kernel in front of them has ended, to be compared on a GPU.

Their first weights come meanwhile; they wait before they read what it has written (`wait_for_last` in common.cuh).
Only launches through cuLaunchKernelEx can ask for that, which CuPy has not.  Graphs keep it from CUDA 12.3 on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cuda.cupy_driver import CupyDriver
from localllm.kernels.cuda.driver import Defines

#: The oldest devices that do so.
CAPABILITY = (9, 0)
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h.
_EARLY = 6

plain_load = CupyDriver.load_module


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes at a multiple of 8."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


@cache
def library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Early:
    """One of CuPy's functions, launched so."""

    def __init__(self, function: Any) -> None:
        self.ptr = function.ptr

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int, stream: Any
    ) -> None:
        held = [np.array(value) for value in args]
        pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        attribute = _Attribute(_EARLY, 0, 1)
        config = _Config((*grid,), (*block,), shared_mem, stream.ptr, ctypes.pointer(attribute), 1)
        handle = ctypes.c_void_p(self.ptr)
        if status := library().cuLaunchKernelEx(ctypes.byref(config), handle, pointers, None):
            raise KernelError(f"cuLaunchKernelEx failed with CUDA's error {status}")


def load_early(driver: CupyDriver, device: int, name: str, defines: Defines | None = None) -> Any:
    """`CupyDriver.load_module` of kernels that wait by themselves; those for one token are launched early."""
    own = dict(defines or {})
    is_product = name == "matvec" and own.get("TOKENS") == 1 and not {"EXPERTS", "HEADS"} & {*own}
    if is_product or name == "elementwise":
        own["EARLY"] = 1
    module = plain_load(driver, device, name, own)
    kernel = "matvec_gated" if "GATED" in own else "matvec"
    if is_product and kernel not in module.functions:
        module.functions[kernel] = Early(module.cupy.get_function(kernel))
    return module
