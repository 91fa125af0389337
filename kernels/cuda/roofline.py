"""Performance limits of a CUDA device: its memory bandwidth and its multiply rate.

As in `localllm.kernels.cpu.roofline`, a result is meaningful only next to a limit measured in the same minute on the
same device, because clock rates depend on load and temperature.

Products use ``mma.sync``, as all kernels of this package do.  Tensor cores of compute capability 9.0 and 10.0 have
additional, faster instructions: for these devices the result is the limit of the kernels, not of the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cuda.driver import DeviceMemory, Driver, Stream
from localllm.kernels.cuda.matmul import TENSOR_CORES

#: Operands: signed bytes, or 16-bit floats, with 32-bit sums.
Kind = Literal["int8", "f16", "bf16"]
KINDS: tuple[Kind, ...] = ("int8", "f16", "bf16")

#: Bytes that are copied or read at once: many times the size of caches, but at most 1 / PART_OF_MEMORY of the free
#: memory.
MAX_BYTES, PART_OF_MEMORY = 1 << 29, 4
#: Rounds of products in one launch: some milliseconds.
ROUNDS = 1 << 12

# As in ceilings.cu.
THREADS, CHAINS, PERIOD = 256, 8, 4
_WARPS = THREADS // 32
#: Blocks per multiprocessor, of the kernel that reads and of the kernels that multiply.
_READERS, _MULTIPLIERS = 8, 2


class Stopwatch:
    """Times work on a stream, by events between the pieces of work.

    The device receives each piece before it has finished the previous one.  So the host's time does not count, as
    long as a
    piece takes the device longer than the host needs to submit it: some ten microseconds.
    """

    def __init__(self, driver: Driver, stream: Stream, repetitions: int = 7) -> None:
        self._driver, self._stream = driver, stream
        self._marks = [driver.event(stream.device, timing=True) for _ in range(repetitions + 1)]

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the median of several times after a warm-up; ``work`` submits work to the stream."""
        work()
        for i, mark in enumerate(self._marks):
            if i:
                work()
            self._driver.record(mark, self._stream)
        self._driver.synchronize(self._stream)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return statistics.median(self._driver.elapsed_seconds(begin, end) for begin, end in pairs)


class CUDARoofline:
    def __init__(self, driver: Driver, device: int, *, n_bytes: int = 0, rounds: int = 0) -> None:
        self._driver, self._device, self._rounds = driver, device, rounds or ROUNDS
        self._properties = driver.properties(device)
        n_bytes = n_bytes or min(MAX_BYTES, driver.memory_info(device).free // PART_OF_MEMORY)
        self.n_bytes = n_bytes // 16 * 16
        has_tensor_cores = self._properties.capability >= TENSOR_CORES
        self.kinds: tuple[Kind, ...] = KINDS if has_tensor_cores else ("int8", "f16")  # operands that it multiplies
        self._bytes_of_step = 16 * 8 * 32 if has_tensor_cores else 32 * 4 * 4
        self._stream = driver.stream(device)
        self._stopwatch = Stopwatch(driver, self._stream)
        self._module = driver.load_module(device, "ceilings")
        self._data, self._copy = (driver.allocate(device, self.n_bytes) for _ in range(2))
        self._fill()
        n_warps = max(_READERS, _MULTIPLIERS) * self._properties.n_multiprocessors * _WARPS
        self._sums = driver.allocate(device, 4 * n_warps)
        self._operands: dict[Kind, DeviceMemory] = {}

    def _fill(self) -> None:
        """Fill with random words: some devices are faster with zeros."""
        chunk = np.random.default_rng(0).integers(0, 1 << 32, min(self.n_bytes, 1 << 24) // 4, np.uint32)
        for begin in range(0, self.n_bytes, chunk.nbytes):
            n = min(chunk.nbytes, self.n_bytes - begin)
            self._driver.upload(self._data.at(begin, n), chunk[: n // 4], self._stream)
        self._driver.synchronize(self._stream)

    # -- Memory ----------------------------------------------------------------------------------------------------

    def copy_bandwidth(self) -> float:
        """Measure the bandwidth of a copy in the device's memory, bytes read and written per second."""
        seconds = self._stopwatch.seconds(lambda: self._driver.copy(self._copy, self._data, self._stream))
        return 2 * self.n_bytes / seconds

    def read_bandwidth(self) -> float:
        """Measure the bytes per second that a kernel reads."""
        return self.n_bytes / self._stopwatch.seconds(self._read)

    def _read(self) -> None:
        n = np.int64(self.n_bytes // 16)
        self._launch("read_words", _READERS, self._data, n)

    def total(self) -> int:
        """Return the sum of all words that are read, modulo 2^32."""
        self._read()
        return int(self._sums_of(_READERS, np.uint32).sum(dtype=np.uint32))

    # -- Products --------------------------------------------------------------------------------------------------

    def rate(self, kind: Kind) -> float:
        """Measure operations per second; a multiply-add counts as two."""
        self._load(kind)
        steps = self._rounds * CHAINS * PERIOD * _MULTIPLIERS * self._properties.n_multiprocessors * _WARPS
        products = steps * (self._bytes_of_step if kind == "int8" else 16 * 8 * 16)
        return 2 * products / self._stopwatch.seconds(lambda: self._multiply(kind))

    def _multiply(self, kind: Kind) -> None:
        self._launch(f"multiply_{kind}", _MULTIPLIERS, self._operands[kind], np.int32(self._rounds))

    def _load(self, kind: Kind) -> None:
        if kind not in self.kinds:
            raise KernelError(f"CUDA device {self._device}, {self._properties.name}, does not multiply {kind}")
        if kind not in self._operands:
            words = operands(kind)
            self._operands[kind] = self._driver.allocate(self._device, words.nbytes)
            self._driver.upload(self._operands[kind], words, self._stream)
            self._driver.synchronize(self._stream)

    def sums(self, kind: Kind) -> NDArray[Any]:
        """Return the sum of the products of each warp, which are all equal; for bytes modulo 2^32."""
        self._load(kind)
        self._multiply(kind)
        return self._sums_of(_MULTIPLIERS, np.uint32 if kind == "int8" else np.float32)

    # -- Launches --------------------------------------------------------------------------------------------------

    def _launch(self, kernel: str, blocks: int, of: DeviceMemory, n: np.number[Any]) -> None:
        grid = (blocks * self._properties.n_multiprocessors,)
        self._driver.launch(self._module, kernel, grid, (THREADS,), [of, n, self._sums], self._stream)

    def _sums_of(self, blocks: int, dtype: Any) -> NDArray[Any]:
        sums = np.zeros(blocks * self._properties.n_multiprocessors * _WARPS, dtype)
        self._driver.download(sums, self._sums.at(0, sums.nbytes), self._stream)
        self._driver.synchronize(self._stream)
        return sums


def operands(kind: Kind) -> NDArray[np.uint32]:
    """Return random numbers for ceilings.cu: left operands [CHAINS, 32, 4] and right operands [PERIOD, 32, 2]."""
    random, n_words = np.random.default_rng(0), 32 * (4 * CHAINS + 2 * PERIOD)
    if kind == "int8":
        return random.integers(-127, 128, 4 * n_words, np.int8).view(np.uint32)
    values = random.integers(-8, 9, 2 * n_words).astype(np.float32) / 8  # sums of their products are exact
    if kind == "f16":
        return values.astype(np.float16).view(np.uint32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
