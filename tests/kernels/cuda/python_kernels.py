"""The kernels of ``sources/arithmetic.cu`` in Python, for emulated devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.cuda.driver import Defines
from tests.cuda_on_cpu.emulated_kernels import PythonKernel

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]


def _floats(memory: Bytes, n: Any) -> NDArray[np.float32]:
    return memory[: 4 * int(n)].view(np.float32)


def _arithmetic(defines: Defines) -> Mapping[str, PythonKernel]:
    step = np.float32(defines.get("STEP", 1))

    def scale_and_add(
        grid: Shape, block: Shape, x: Bytes, n: np.int32, factor: np.float32, offset: np.float32
    ) -> None:
        values = _floats(x, n)
        values[:] = values * factor + offset

    def add_step(grid: Shape, block: Shape, source: Bytes, to: Bytes, n: np.int32) -> None:
        _floats(to, n)[:] = _floats(source, n) + step

    def reverse(grid: Shape, block: Shape, source: Bytes, to: Bytes, n: np.int32) -> None:
        _floats(to, n)[:] = _floats(source, n)[::-1].copy()

    memory = np.ndarray
    return {
        "scale_and_add": PythonKernel(scale_and_add, (memory, np.int32, np.float32, np.float32)),
        "add_step": PythonKernel(add_step, (memory, memory, np.int32)),
        "reverse": PythonKernel(reverse, (memory, memory, np.int32)),
    }


KERNELS = {"arithmetic": _arithmetic}
