"""One device that tests of kernels run on: memory from and to numpy, and launches that are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.cuda.driver import Defines, DeviceMemory, Driver

Array = NDArray[Any]


class Device:
    """Device 0 of a driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream(0)
        self.properties = driver.properties(0)

    def put(self, array: Array) -> DeviceMemory:
        """A copy; at least one byte, so that also nothing has an address."""
        array = np.ascontiguousarray(array)
        if array.nbytes == 0:
            array = np.zeros(1, np.uint8)
        memory = self.driver.allocate(0, array.nbytes)
        self.driver.upload(memory, array, self.stream)
        self.driver.synchronize(self.stream)
        return memory

    def get(self, memory: DeviceMemory, like: Array) -> Array:
        """What memory holds, in the shape and type of another array."""
        out = np.empty_like(like)
        self.driver.download(out, memory.at(0, out.nbytes), self.stream)
        self.driver.synchronize(self.stream)
        return out

    def run(
        self,
        module: str,
        defines: Defines,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[DeviceMemory | np.number[Any]],
        shared_bytes: int = 0,
    ) -> None:
        loaded = self.driver.load_module(0, module, defines)
        self.driver.launch(loaded, kernel, grid, block, arguments, self.stream, shared_bytes)
        self.driver.synchronize(self.stream)
