"""Optimisations of decoding that must be compared on a GPU before localllm uses them.

**Products that start early**, before the previous kernel has ended: they load their first weights, and wait before
they read inputs of the previous kernel (`wait_for_last` in common.cuh).  Launches through cuLaunchKernelEx can
request this, which CuPy does not support.  Graphs keep the request since CUDA 12.3.

**Weights read next to attention**, which leaves most of the memory bandwidth unused: a branch of the graph reads the
weights of the next product into the second-level cache.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cuda.cupy_driver import CupyDriver
from localllm.kernels.cuda.driver import Defines, DeviceMemory, Event, Stream
from localllm.kernels.cuda.roofline import THREADS
from localllm.kernels.cuda.step import CUDAStep, Work

#: Oldest devices that support early starts.
CAPABILITY = (9, 0)
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h.
_EARLY = 6

#: Blocks that prefetch, and their warps, as in ceilings.cu.
_READERS, _WARPS = 32, THREADS // 32
#: Per step: the stream of the branch, memory for sums, and events.
_BRANCHES: WeakKeyDictionary[CUDAStep, tuple[Stream, DeviceMemory, list[Event]]] = WeakKeyDictionary()

plain_load = CupyDriver.load_module


# -- Products that start early -------------------------------------------------------------------------------------


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes with an alignment of 8."""

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
    """A function of CuPy that starts early."""

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
    """`CupyDriver.load_module` for kernels that wait by themselves; kernels for one token start early."""
    own = dict(defines or {})
    is_product = name == "matvec" and own.get("TOKENS") == 1 and not {"EXPERTS", "HEADS"} & {*own}
    if is_product or name == "elementwise":
        own["EARLY"] = 1
    module = plain_load(driver, device, name, own)
    kernel = "matvec_gated" if "GATED" in own else "matvec"
    if is_product and kernel not in module.functions:
        module.functions[kernel] = Early(module.cupy.get_function(kernel))
    return module


# -- Weights read next to attention ---------------------------------------------------------------------------------


def launch_reading_ahead(step: CUDAStep, launches: Sequence[Work]) -> None:
    """`CUDAStep._launch` with a branch from the first kernel of attention to its last."""
    driver, stream, device = step.driver, step.stream, step.device
    if step not in _BRANCHES:
        _BRANCHES[step] = driver.stream(device), driver.allocate(device, 4 * _READERS * _WARPS), []
    branch, sums, events = _BRANCHES[step]
    reader, join = driver.load_module(device, "ceilings"), None
    for i, launch in enumerate(launches):
        kernel = launch.args[1]
        product = next((later.args[4] for later in launches[i:] if later.args[1] == "matvec"), None)
        if kernel == "attention_split" and product is not None:
            weights, (fork, join) = product[5], (driver.event(device) for _ in range(2))
            events += fork, join
            driver.record(fork, stream)
            driver.wait(branch, fork)
            words = [weights, np.int64(weights.n_bytes // 16), sums]
            driver.launch(reader, "read_words", (_READERS,), (THREADS,), words, branch)
            driver.record(join, branch)
        launch()
        if kernel == "attention_merge" and join is not None:
            driver.wait(stream, join)
            join = None
