"""Small CUDA sources for tests, compiled by NVRTC and run on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_on_cpu import build, nvrtc
from tests.cuda_on_cpu.module import FORWARD, EmulatedModule, MemoryRange, Mode, Order

Array = NDArray[Any]


def skip_without_tools() -> None:
    """Skip a test if NVRTC or g++ is missing."""
    reason = build.missing() or nvrtc.missing()
    if reason is not None:
        pytest.skip(reason)


def compile_ptx(source: str, architecture: int = 80) -> str:
    skip_without_tools()
    return nvrtc.compile_ptx(source, architecture, name="test.cu")


class Kernels:
    """The kernels of a source.  Arrays are passed by address, and check mode permits access to their memory only."""

    def __init__(self, ptx: str, mode: Mode = "fast", *, step_limit: int = 1 << 22) -> None:
        self.module = EmulatedModule(ptx, mode, step_limit=step_limit)

    @classmethod
    def of(cls, source: str, mode: Mode = "fast", *, architecture: int = 80, step_limit: int = 1 << 22) -> Kernels:
        return cls(compile_ptx(source, architecture), mode, step_limit=step_limit)

    def run(
        self,
        kernel: str,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        *arguments: Array | np.generic,
        order: Order = FORWARD,
        shared_bytes: int = 0,
        count_traffic: bool = False,
    ) -> None:
        ranges = [
            MemoryRange(a.ctypes.data, a.nbytes, a.flags.writeable) for a in arguments if isinstance(a, np.ndarray)
        ]
        values = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        self.module.launch(
            kernel,
            grid,
            block,
            values,
            shared_bytes=shared_bytes,
            order=order,
            ranges=ranges,
            count_traffic=count_traffic,
        )


@dataclass(frozen=True)
class Case:
    """An instruction to test on arrays: ``asm`` with %0 as its result and %1, %2, … as its inputs.

    Types are "u16", "u32", "u64", "f32" and "f64"; 16-bit floats are u16, and their pairs u32.
    """

    name: str
    asm: str
    result: str
    inputs: tuple[str, ...]


_C_TYPES = {"u16": "unsigned short", "u32": "unsigned", "u64": "unsigned long long", "f32": "float", "f64": "double"}
_CONSTRAINTS = {"u16": "h", "u32": "r", "u64": "l", "f32": "f", "f64": "d"}
_NUMPY = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f32": np.float32, "f64": np.float64}


class Instructions:
    """Instructions compiled as one module, each applied to arrays element by element."""

    def __init__(self, cases: Sequence[Case], *, architecture: int = 80) -> None:
        self._cases = {case.name: case for case in cases}
        self._kernels = Kernels.of("\n".join(_elementwise(case) for case in cases), architecture=architecture)

    def __call__(self, name: str, *inputs: Array) -> Array:
        """Apply an instruction.  Inputs are broadcast, and viewed as the types of the case."""
        case = self._cases[name]
        arrays = [np.array(a).view(_NUMPY[t]) for a, t in zip(np.broadcast_arrays(*inputs), case.inputs, strict=True)]
        shape = arrays[0].shape
        arrays = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        out = np.zeros(arrays[0].size, _NUMPY[case.result])
        self._kernels.run(f"try_{name}", (out.size + 255) // 256, 256, *arrays, out, np.int32(out.size))
        return out.reshape(shape)


def _elementwise(case: Case) -> str:
    pointers = "".join(f"const {_C_TYPES[t]}* x{i}, " for i, t in enumerate(case.inputs))
    values = ", ".join(f'"{_CONSTRAINTS[t]}"(x{i}[i])' for i, t in enumerate(case.inputs))
    return f"""
extern "C" __global__ void try_{case.name}({pointers}{_C_TYPES[case.result]}* out, int n) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  {_C_TYPES[case.result]} result;
  asm volatile("{case.asm}" : "={_CONSTRAINTS[case.result]}"(result) : {values});
  out[i] = result;
}}"""
