"""Kernels of emulated devices: functions in Python, or translated CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cuda.driver import DeviceMemory
from tests.cuda_on_cpu.emulated_memory import Slice
from tests.cuda_on_cpu.errors import LaunchError
from tests.cuda_on_cpu.module import EmulatedModule, MemoryRange, Mode, Order

#: Arguments of a kernel: device memory and numbers.
Arguments = Sequence[Slice | np.number[Any]]
Ranges = Sequence[MemoryRange]
Shape = tuple[int, int, int]


class Kernels(Protocol):
    def check(self, kernel: str, arguments: Sequence[DeviceMemory | np.number[Any]]) -> None:
        """Raise KernelError if the kernel is unknown or takes other arguments."""
        ...

    def launch(
        self, kernel: str, grid: Shape, block: Shape, arguments: Arguments, shared_bytes: int, ranges: Ranges
    ) -> None:
        """Run a kernel.  ``ranges``: all memory that it may access."""
        ...


@dataclass(frozen=True)
class PythonKernel:
    """A kernel that is a Python function.

    Attributes:
        function: takes the grid, the block, and the arguments: memory as uint8 arrays, and numbers.
        parameters: the type of each argument; np.ndarray for memory.
    """

    function: Callable[..., None]
    parameters: tuple[type, ...]


class PythonKernels:
    def __init__(self, name: str, kernels: Mapping[str, PythonKernel]) -> None:
        self._name = name
        self._kernels = kernels

    def check(self, kernel: str, arguments: Sequence[DeviceMemory | np.number[Any]]) -> None:
        if kernel not in self._kernels:
            raise KernelError(f"the module {self._name} has no kernel {kernel}")
        given = tuple(np.ndarray if isinstance(a, DeviceMemory) else type(a) for a in arguments)
        if given != (takes := self._kernels[kernel].parameters):
            raise KernelError(f"kernel {kernel} takes {_names(takes)}, but is given {_names(given)}")

    def launch(
        self, kernel: str, grid: Shape, block: Shape, arguments: Arguments, shared_bytes: int, ranges: Ranges
    ) -> None:
        given: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Slice):
                argument.valid()[:] = 1  # the function may have written any byte
                given.append(argument.bytes())
            else:
                given.append(argument)
        self._kernels[kernel].function(grid, block, *given)


class TranslatedKernels:
    """A module of CUDA kernels.

    Args:
        order: the order of threads and asynchronous copies in a kernel.
    """

    def __init__(self, module: EmulatedModule, order: Order) -> None:
        self._module = module
        self._order = order

    def check(self, kernel: str, arguments: Sequence[DeviceMemory | np.number[Any]]) -> None:
        values = [np.uint64(0) if isinstance(a, DeviceMemory) else a for a in arguments]
        try:
            self._module.check_arguments(kernel, values)
        except LaunchError as error:
            raise KernelError(str(error)) from error

    def launch(
        self, kernel: str, grid: Shape, block: Shape, arguments: Arguments, shared_bytes: int, ranges: Ranges
    ) -> None:
        values = [np.uint64(a.bytes().ctypes.data) if isinstance(a, Slice) else a for a in arguments]
        self._module.launch(kernel, grid, block, values, shared_bytes=shared_bytes, order=self._order, ranges=ranges)


@functools.cache
def translated(ptx: str, mode: Mode) -> EmulatedModule:
    return EmulatedModule(ptx, mode)


def _names(types: Sequence[type]) -> str:
    return "(" + ", ".join("memory" if t is np.ndarray else t.__name__ for t in types) + ")"
