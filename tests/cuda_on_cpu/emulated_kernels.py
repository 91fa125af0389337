"""The kernels that emulated devices run: functions in Python, or CUDA that is translated."""

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

#: What a kernel is given: device memory, or a number.
Argument = Slice | np.number[Any]
Shape = tuple[int, int, int]


class Kernels(Protocol):
    """A module."""

    def check(self, kernel: str, arguments: Sequence[DeviceMemory | np.number[Any]]) -> None:
        """Raises KernelError where there is no such kernel, or where it takes other arguments."""
        ...

    def launch(
        self,
        kernel: str,
        grid: Shape,
        block: Shape,
        arguments: Sequence[Argument],
        shared_bytes: int,
        ranges: Sequence[MemoryRange],
    ) -> None:
        """Runs it.  ``ranges``: all memory that it may touch."""
        ...


@dataclass(frozen=True)
class PythonKernel:
    """A kernel that is a function.

    Attributes:
        function: called with the grid, the block, and then the arguments: memory as uint8 arrays, and numbers.
        parameters: the type of each argument; np.ndarray for memory.
    """

    function: Callable[..., None]
    parameters: tuple[type, ...]


class PythonKernels:
    """A module of functions."""

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
        self,
        kernel: str,
        grid: Shape,
        block: Shape,
        arguments: Sequence[Argument],
        shared_bytes: int,
        ranges: Sequence[MemoryRange],
    ) -> None:
        given: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Slice):
                argument.valid()[:] = 1  # what a function writes is not known
                given.append(argument.bytes())
            else:
                given.append(argument)
        self._kernels[kernel].function(grid, block, *given)


class TranslatedKernels:
    """A module of CUDA kernels.

    Args:
        order: the order in which a kernel's threads run and its asynchronous copies land.
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
        self,
        kernel: str,
        grid: Shape,
        block: Shape,
        arguments: Sequence[Argument],
        shared_bytes: int,
        ranges: Sequence[MemoryRange],
    ) -> None:
        values = [np.uint64(a.bytes().ctypes.data) if isinstance(a, Slice) else a for a in arguments]
        self._module.launch(kernel, grid, block, values, shared_bytes=shared_bytes, order=self._order, ranges=ranges)


@functools.cache
def translated(ptx: str, mode: Mode) -> EmulatedModule:
    return EmulatedModule(ptx, mode)


def _names(types: Sequence[type]) -> str:
    return "(" + ", ".join("memory" if t is np.ndarray else t.__name__ for t in types) + ")"
