"""The kernels that emulated devices run: functions in Python, or CUDA that is translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cuda.driver import DeviceMemory

#: What a kernel is given: the bytes of device memory, from where it was pointed to, or a number.
Argument = NDArray[np.uint8] | np.number[Any]
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
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """Runs it.  ``ranges``: (address, bytes) of all memory that it may touch."""
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
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        self._kernels[kernel].function(grid, block, *arguments)


def _names(types: Sequence[type]) -> str:
    return "(" + ", ".join("memory" if t is np.ndarray else t.__name__ for t in types) + ")"
