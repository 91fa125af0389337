"""Weights on a CUDA device: a file's rows go up as they are, and the device packs them.

    file ──threads──▶ pinned memory ──bus──▶ raw rows ──`pack`──▶ packed matrix
                      two buffers            two buffers

While the device takes one buffer, the host reads the next rows into the other; the file's pages are dropped behind
it.  So neither the host nor the device ever holds more of a tensor in its file's form than two buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cpu.host import default_threads
from localllm.kernels.cuda.driver import DeviceMemory, Driver, Event
from localllm.kernels.cuda.matmul import GROUP, PackedFormat, pack_launch, packed_format
from localllm.kernels.ops import Weight, Widening
from localllm.quant.formats import dequantize
from localllm.quant.lut import block_size
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target

#: Values that a row is padded to.
PADDING = 32
#: Bytes of rows that go up at once, if a group of rows has no more; and threads that read them, at most.
CHUNK_BYTES, READERS = 8 << 20, 4
#: Bytes of a file that are read before its pages are let go.
KEPT_BYTES = 64 << 20


def padded(n: int) -> int:
    """The values that a row of ``n`` takes."""
    return -(-n // PADDING) * PADDING


@dataclass(frozen=True, eq=False)
class CUDAVector:
    """float32 [n], with zeros behind up to a padded length."""

    memory: DeviceMemory
    n: int


@dataclass(frozen=True, eq=False)
class CUDALinear:
    """A packed matrix: on a device's tiles, see `localllm.kernels.cuda.matmul`.  ``name``: as the file has it."""

    memory: DeviceMemory
    packed: PackedFormat
    bias: CUDAVector | None
    n_in: int
    n_out: int
    name: str

    @property
    def format(self) -> str:
        return self.packed.name

    @property
    def n_bytes(self) -> int:
        return self.memory.n_bytes


@dataclass(frozen=True, eq=False)
class _Staging:
    """A buffer on either side of the bus, and when the device was through with both."""

    host: NDArray[np.uint8]
    device: DeviceMemory
    free: Event


class WeightLoader:
    """Brings weights to a device, one at a time.

    Args:
        chunk_bytes: of rows that go up at once.
    """

    def __init__(self, driver: Driver, device: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver = driver
        self._device = device
        self._capability = driver.properties(device).capability
        self._stream = driver.stream(device)
        self._chunk_bytes = chunk_bytes
        self._staging: tuple[_Staging, ...] = ()
        self._readers: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Gives back what loading takes beside the weights; it comes again when more are loaded."""
        self._staging = ()
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None

    def packed_bytes(self, weight: Weight) -> int:
        """As `localllm.kernels.ops.Loader` has it."""
        if len(weight.shape) < 2:
            return 4 * padded(weight.shape[0])
        n_out, n_in = weight.shape
        return packed_format(repack_target(weight.type), self._capability).packed_bytes(n_out, n_in)

    def vector(self, weight: Weight) -> CUDAVector:
        """Decoded."""
        values = dequantize(weight.data, weight.type).reshape(-1)
        wide = np.pad(values, (0, padded(len(values)) - len(values)))
        memory = self._driver.allocate(self._device, wide.nbytes)
        self._driver.upload(memory, wide, self._stream)
        self._driver.synchronize(self._stream)
        return CUDAVector(memory, len(values))

    def linear(self, weight: Weight, bias: Weight | None, widening: Widening | None) -> CUDALinear:
        """Packed; see `localllm.kernels.ops.Loader.load_linear`."""
        n_out, n_in = weight.shape
        if bias is not None and bias.shape != (n_out,):
            raise KernelError(f"a matrix [{n_out}, {n_in}] cannot have a bias {list(bias.shape)}")
        format = packed_format(repack_target(weight.type), self._capability)
        try:
            memory = self._pack(weight, format)
        except ScaleRangeError:
            format = packed_format(FALLBACK, self._capability)
            if widening is not None:
                widening(weight, format.name, format.packed_bytes(n_out, n_in))
            memory = self._pack(weight, format)
        return CUDALinear(memory, format, None if bias is None else self.vector(bias), n_in, n_out, weight.name)

    def _pack(self, weight: Weight, format: PackedFormat) -> DeviceMemory:
        """The weight's tiles.

        Raises:
            ScaleRangeError: it cannot be written in this format.
        """
        n_out, n_in = weight.shape
        rows = weight.data.reshape(n_out, -1)
        row_bytes = block_size(format.type).row_bytes(n_in)
        packed = self._driver.allocate(self._device, format.packed_bytes(n_out, n_in))
        module = self._driver.load_module(self._device, "pack", format.defines)
        chunk_rows = max(1, self._chunk_bytes // (GROUP * row_bytes)) * GROUP
        staging = self._staging_of(min(chunk_rows, n_out) * row_bytes)
        kept_rows = chunk_rows * max(1, KEPT_BYTES // (chunk_rows * row_bytes))
        try:
            for i, first in enumerate(range(0, n_out, chunk_rows)):
                place, n = staging[i % 2], min(chunk_rows, n_out - first)
                self._driver.synchronize(place.free)
                self._read(weight, format, rows[first : first + n], place.host[: n * row_bytes].reshape(n, -1))
                if (first + n) % kept_rows == 0:
                    weight.drop_pages()
                raw = place.device.at(0, n * row_bytes)
                self._driver.upload(raw, place.host[: n * row_bytes], self._stream)
                launch = pack_launch(format, n, n_in)
                begin, end = (format.packed_bytes(rows, n_in) for rows in (first, first + n))
                sizes = np.int32(n), np.int64(row_bytes), np.int32(n_in), np.int32(format.n_tiles(n_in))
                self._driver.launch(
                    module,
                    launch.kernel,
                    launch.grid,
                    launch.block,
                    [raw, packed.at(begin, end - begin), *sizes],
                    self._stream,
                )
                self._driver.record(place.free, self._stream)
        finally:
            self._driver.synchronize(self._stream)  # nobody may let go of the memory before
        return packed

    def _staging_of(self, n_bytes: int) -> tuple[_Staging, ...]:
        """Two buffers of at least ``n_bytes``."""
        if not self._staging or self._staging[0].device.n_bytes < n_bytes:
            self._staging = ()
            n_bytes = max(n_bytes, self._chunk_bytes)
            driver, device = self._driver, self._device
            self._staging = tuple(
                _Staging(driver.pinned(n_bytes), driver.allocate(device, n_bytes), driver.event(device))
                for _ in range(2)
            )
        return self._staging

    def _read(self, weight: Weight, format: PackedFormat, rows: NDArray[np.uint8], to: NDArray[np.uint8]) -> None:
        """Rows of the file into pinned memory, in the format's blocks; threads share them."""

        def share(part: slice) -> None:
            to[part] = repack(rows[part], weight.type, format.type)

        if self._readers is None:
            self._readers = ThreadPoolExecutor(min(READERS, default_threads()), "localllm-upload")
        list(self._readers.map(share, _parts(len(rows), READERS)))


def _parts(n: int, most: int) -> Iterator[slice]:
    """``n`` rows in at most so many parts of about the same size."""
    bounds = sorted({i * n // most for i in range(most + 1)})
    return (slice(start, stop) for start, stop in pairwise(bounds))
