"""Weights on a CUDA device: a file's rows go up as they are, and the device packs them.

    file ──threads──▶ pinned memory ──bus──▶ raw rows ──`pack`──▶ packed matrix
                      two buffers            two buffers

Uploads and packing have a stream each.  While one buffer's rows are packed, the other's go up, and the host reads the
next ones as soon as it has been copied; the file's pages are dropped behind.  So neither the host nor the device ever
holds more of a tensor in its file's form than two buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cpu.host import default_threads
from localllm.kernels.cuda.driver import DeviceMemory, Driver, Event
from localllm.kernels.cuda.matmul import GROUP, PackedFormat, pack_launch, packed_format
from localllm.kernels.experts import matrices_to_pack
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
class _Packed:
    """One matrix or several, one after the other, in tiles (`localllm.kernels.cuda.matmul`).

    Attributes:
        name: as the file has it.
    """

    memory: DeviceMemory
    packed: PackedFormat
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
class CUDALinear(_Packed):
    """A packed matrix."""

    bias: CUDAVector | None


@dataclass(frozen=True, eq=False)
class CUDAExperts(_Packed):
    """Packed matrices of experts."""

    n_experts: int


@dataclass(frozen=True, eq=False)
class _Staging:
    """A buffer on either side of the bus: the host's is free again once it was uploaded, the device's once packed."""

    host: NDArray[np.uint8]
    device: DeviceMemory
    uploaded: Event
    packed: Event


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
        self._uploads = driver.stream(device)
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
        return _packed_bytes(weight.shape, packed_format(repack_target(weight.type), self._capability))

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
        packed = self._packed(weight, widening)
        return CUDALinear(*packed, n_in, n_out, weight.name, None if bias is None else self.vector(bias))

    def experts(self, weight: Weight, widening: Widening | None) -> CUDAExperts:
        """Packed; see `localllm.kernels.ops.Loader.load_experts`."""
        n_experts, n_out, n_in = weight.shape
        return CUDAExperts(*self._packed(weight, widening), n_in, n_out, weight.name, n_experts)

    def _packed(self, weight: Weight, widening: Widening | None) -> tuple[DeviceMemory, PackedFormat]:
        """The tiles of one matrix or of several, and their format."""
        format = packed_format(repack_target(weight.type), self._capability)
        try:
            return self._pack(weight, format), format
        except ScaleRangeError:
            format = packed_format(FALLBACK, self._capability)
            if widening is not None:
                widening(weight, format.name, _packed_bytes(weight.shape, format))
            return self._pack(weight, format), format

    def _pack(self, weight: Weight, format: PackedFormat) -> DeviceMemory:
        """The weight's tiles.

        Raises:
            ScaleRangeError: it cannot be written in this format.
        """
        packed = self._driver.allocate(self._device, _packed_bytes(weight.shape, format))
        matrices = matrices_to_pack(weight, GROUP)
        n_bytes = packed.n_bytes // len(matrices)
        for i, rows in enumerate(matrices):
            self._pack_rows(weight, rows, format, packed.at(i * n_bytes, n_bytes))
        return packed

    def _pack_rows(self, weight: Weight, rows: NDArray[np.uint8], format: PackedFormat, packed: DeviceMemory) -> None:
        """Rows of a weight to tiles."""
        driver, n_out, n_in = self._driver, len(rows), weight.shape[-1]
        row_bytes = block_size(format.type).row_bytes(n_in)
        module = driver.load_module(self._device, "pack", format.defines)
        chunk_rows = max(1, self._chunk_bytes // (GROUP * row_bytes)) * GROUP
        staging = self._staging_of(min(chunk_rows, n_out) * row_bytes)
        kept_rows = chunk_rows * max(1, KEPT_BYTES // (chunk_rows * row_bytes))
        try:
            for i, first in enumerate(range(0, n_out, chunk_rows)):
                place, n = staging[i % 2], min(chunk_rows, n_out - first)
                driver.synchronize(place.uploaded)
                self._read(weight, format, rows[first : first + n], place.host[: n * row_bytes].reshape(n, -1))
                if (first + n) % kept_rows == 0:
                    weight.drop_pages()
                raw = place.device.at(0, n * row_bytes)
                driver.wait(self._uploads, place.packed)
                driver.upload(raw, place.host[: n * row_bytes], self._uploads)
                driver.record(place.uploaded, self._uploads)
                driver.wait(self._stream, place.uploaded)
                launch = pack_launch(format, n, n_in)
                begin, end = (format.packed_bytes(rows, n_in) for rows in (first, first + n))
                sizes = np.int32(n), np.int64(row_bytes), np.int32(n_in), np.int32(format.n_tiles(n_in))
                driver.launch(
                    module,
                    launch.kernel,
                    launch.grid,
                    launch.block,
                    [raw, packed.at(begin, end - begin), *sizes],
                    self._stream,
                )
                driver.record(place.packed, self._stream)
        finally:
            for stream in (self._uploads, self._stream):
                driver.synchronize(stream)  # nobody may let go of the memory before

    def _staging_of(self, n_bytes: int) -> tuple[_Staging, ...]:
        """Two buffers of at least ``n_bytes``."""
        if not self._staging or self._staging[0].device.n_bytes < n_bytes:
            self._staging = ()
            n_bytes = max(n_bytes, self._chunk_bytes)
            driver, device = self._driver, self._device
            self._staging = tuple(
                _Staging(
                    driver.pinned(n_bytes),
                    driver.allocate(device, n_bytes),
                    driver.event(device),
                    driver.event(device),
                )
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


def _packed_bytes(shape: Sequence[int], format: PackedFormat) -> int:
    """Bytes of a packed matrix [n_out, n_in] or of several."""
    *n_experts, n_out, n_in = shape
    return prod(n_experts) * format.packed_bytes(n_out, n_in)


def _parts(n: int, most: int) -> Iterator[slice]:
    """``n`` rows in at most so many parts of about the same size."""
    bounds = sorted({i * n // most for i in range(most + 1)})
    return (slice(start, stop) for start, stop in pairwise(bounds))
