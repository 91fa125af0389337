"""Memory of emulated devices: limited, and poisoned when it is allocated and when it is freed."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import DeviceMemoryError, UsageError
from localllm.kernels.cuda.driver import DeviceMemory, MemoryInfo
from tests.cuda_on_cpu.errors import CudaOnCpuError
from tests.cuda_on_cpu.module import MemoryRange

#: Content of new and of freed memory: NaN as float16, bfloat16, float32 and float64, −1 as an integer.
POISON = 0xFF
#: Alignment of allocations, the same as cudaMalloc's.
ALIGNMENT = 256
#: Bytes of freed memory that stay poisoned, so that late work finds no data of another allocation.
QUARANTINE_BYTES = 64 << 20


class HostFault(CudaOnCpuError):
    """A fault of the host that CUDA does not notice, such as memory used after it was freed."""


class Allocation:
    """Memory of a device.  The owner in `DeviceMemory` keeps it alive.

    Attributes:
        valid: whether each byte was written; kernels update it only in check mode.
    """

    def __init__(self, device: int, n_bytes: int) -> None:
        raw = np.full(n_bytes + ALIGNMENT, POISON, np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT
        self.device = device
        self.bytes = raw[begin : begin + n_bytes]
        self.valid = np.zeros(n_bytes, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.is_live = True


class Owner:
    """Frees an allocation when the owner is garbage-collected."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation


class Memories:
    """The memory of all devices.

    Args:
        sizes: bytes of each device.

    Attributes:
        fail_allocation: number of the allocation that fails, starting with 1 for the next one; None for no failure.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.free = list(sizes)
        self.fail_allocation: int | None = None
        self._live: dict[int, Allocation] = {}
        self._quarantine: deque[Allocation] = deque()

    def info(self, device: int) -> MemoryInfo:
        return MemoryInfo(self.free[device], self.sizes[device])

    def allocate(self, device: int, n_bytes: int) -> DeviceMemory:
        if n_bytes <= 0:
            raise UsageError(f"an allocation of {n_bytes} bytes of device memory: it must be at least 1 byte")
        if self.fail_allocation is not None:
            self.fail_allocation -= 1
        if n_bytes > self.free[device] or self.fail_allocation == 0:
            raise DeviceMemoryError(device, n_bytes, *self.info(device))
        allocation = Allocation(device, n_bytes)
        owner = Owner(allocation)
        self.free[device] -= n_bytes
        self._live[allocation.address] = allocation
        weakref.finalize(owner, self._give_back, allocation)
        return DeviceMemory(device, allocation.address, n_bytes, owner)

    def _give_back(self, allocation: Allocation) -> None:
        allocation.is_live = False
        allocation.bytes[:] = POISON
        del self._live[allocation.address]
        self.free[allocation.device] += len(allocation.bytes)
        self._quarantine.append(allocation)
        while sum(len(a.bytes) for a in self._quarantine) > QUARANTINE_BYTES:
            self._quarantine.popleft()

    def ranges(self, devices: set[int]) -> list[MemoryRange]:
        """Return all allocations on these devices."""
        return [
            MemoryRange(a.address, len(a.bytes), valid=a.valid)
            for a in list(self._live.values())
            if a.device in devices
        ]


class Slice:
    """Device memory that work will use.  It does not keep the memory alive, as in CUDA.

    Args:
        use: the work, for error messages.
    """

    def __init__(self, memory: DeviceMemory, use: str) -> None:
        if not isinstance(memory.owner, Owner):
            raise HostFault(f"{use} of device memory that is not an emulated device's")
        self._allocation = memory.owner.allocation
        self._begin = memory.address - self._allocation.address
        self._n_bytes = memory.n_bytes
        self._use = use

    def bytes(self) -> NDArray[np.uint8]:
        """Return the content.  Raises HostFault if the memory was freed."""
        return self._part(self._allocation.bytes)

    def valid(self) -> NDArray[np.uint8]:
        """Return which bytes were written; see `Allocation`."""
        return self._part(self._allocation.valid)

    def _part(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if not self._allocation.is_live:
            raise HostFault(
                f"{self._use} uses {self._n_bytes} bytes of device {self._allocation.device} that were freed before "
                f"it ran"
            )
        return array[self._begin : self._begin + self._n_bytes]


class HostMemory:
    """A host array that work will use later.  It does not keep the array alive, as in CUDA."""

    def __init__(self, array: NDArray[Any]) -> None:
        owner: Any = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        try:
            self._owner: Callable[[], object | None] = weakref.ref(owner)
        except TypeError:  # objects such as bytes allow no weak reference and are kept alive
            self._owner = lambda: owner
        self._address, self._n_bytes = array.ctypes.data, array.nbytes

    def bytes(self, use: str) -> NDArray[np.uint8]:
        """Return the array.  Raises HostFault if it was garbage-collected."""
        if self._owner() is None:
            raise HostFault(f"{use} uses {self._n_bytes} bytes of the host's that were freed before it ran")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self._n_bytes).from_address(self._address))
