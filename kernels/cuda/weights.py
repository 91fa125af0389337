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
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import PackedWeight, Progress, WeightUse, matrices_to_pack
from localllm.kernels.cpu.host import default_threads
from localllm.kernels.cuda.calls import padded
from localllm.kernels.cuda.driver import DeviceMemory, Driver, Event
from localllm.kernels.cuda.matmul import GROUP, PackedFormat, pack_launch, packed_format
from localllm.kernels.graph import Weight
from localllm.quant.lut import block_size
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target

#: Bytes of rows that go up at once, if a group of rows has no more; and threads that read them, at most.
CHUNK_BYTES, READERS = 8 << 20, 4
#: Bytes of a file that are read before its pages are let go.
KEPT_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix or those of experts, one after the other, in tiles (`localllm.kernels.cuda.matmul`)."""

    memory: DeviceMemory
    packed: PackedFormat
    n_in: int
    n_out: int
    name: str  # as the file has it

    @property
    def format(self) -> str:
        return self.packed.name

    @property
    def n_bytes(self) -> int:
        return self.memory.n_bytes


@dataclass(frozen=True, eq=False)
class _Staging:
    """A buffer on either side of the bus: the host's is free again once it was uploaded, the device's once packed."""

    host: NDArray[np.uint8]
    device: DeviceMemory
    uploaded: Event
    packed: Event


class WeightLoader:
    """Brings weights to a device, one at a time."""

    def __init__(self, driver: Driver, device: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver = driver
        self.device = device
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

    def planned(self, weight: Weight) -> PackedMatrix:
        """The result of `matrix`, without memory."""
        return self._matrix(weight, packed_format(repack_target(weight.type), self._capability))

    def _matrix(self, weight: Weight, format: PackedFormat, memory: DeviceMemory | None = None) -> PackedMatrix:
        *_, n_out, n_in = weight.shape
        memory = memory or DeviceMemory(self.device, 0, _packed_bytes(weight.shape, format), None)
        return PackedMatrix(memory, format, n_in, n_out, weight.name)

    def floats(self, use: WeightUse) -> DeviceMemory:
        """A vector, or a matrix's rows or columns, in float32 with zeros behind each up to a padded length."""
        values = use.floats()
        wide = np.pad(values, ((0, 0), (0, padded(values.shape[1]) - values.shape[1])))
        memory = self._driver.allocate(self.device, wide.nbytes)
        self._driver.upload(memory, wide, self._stream)
        self._driver.synchronize(self._stream)
        return memory

    def matrix(self, weight: Weight) -> PackedMatrix:
        """The tiles of one matrix or of several; in another format if that of the plan cannot hold them."""
        format = packed_format(repack_target(weight.type), self._capability)
        try:
            return self._matrix(weight, format, self._pack(weight, format))
        except ScaleRangeError:
            format = packed_format(FALLBACK, self._capability)
            return self._matrix(weight, format, self._pack(weight, format))

    def _pack(self, weight: Weight, format: PackedFormat) -> DeviceMemory:
        """The weight's tiles."""
        packed = self._driver.allocate(self.device, _packed_bytes(weight.shape, format))
        matrices = matrices_to_pack(weight, GROUP)
        n_bytes = packed.n_bytes // len(matrices)
        for i, rows in enumerate(matrices):
            self._pack_rows(weight, rows, format, packed.at(i * n_bytes, n_bytes))
        return packed

    def _pack_rows(self, weight: Weight, rows: NDArray[np.uint8], format: PackedFormat, packed: DeviceMemory) -> None:
        """Rows of a weight to tiles."""
        driver, n_out, n_in = self._driver, len(rows), weight.shape[-1]
        row_bytes = block_size(format.type).row_bytes(n_in)
        module = driver.load_module(self.device, "pack", format.defines)
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
                arguments = raw, packed.at(begin, end - begin), *sizes
                driver.launch(module, launch.kernel, launch.grid, launch.block, arguments, self._stream)
                driver.record(place.packed, self._stream)
        finally:
            for stream in (self._uploads, self._stream):
                driver.synchronize(stream)  # nobody may let go of the memory before

    def _staging_of(self, n_bytes: int) -> tuple[_Staging, ...]:
        """Two buffers of at least ``n_bytes``."""
        if not self._staging or self._staging[0].device.n_bytes < n_bytes:
            self._staging = ()
            n_bytes = max(n_bytes, self._chunk_bytes)
            driver, device = self._driver, self.device
            buffers = ((driver.pinned(n_bytes), driver.allocate(device, n_bytes)) for _ in range(2))
            self._staging = tuple(_Staging(*both, driver.event(device), driver.event(device)) for both in buffers)
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


class PackedWeights:
    """The weights of a graph as kernels read them; of those that were not loaded, as they will."""

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader
        self._matrices: dict[Weight, PackedMatrix] = {}
        self._vectors: dict[Weight, DeviceMemory] = {}

    def matrix(self, weight: Weight) -> PackedMatrix:
        if weight not in self._matrices:
            self._matrices[weight] = self._loader.planned(weight)
        return self._matrices[weight]

    def vector(self, weight: Weight | None) -> DeviceMemory | None:
        """A vector, or a matrix's rows or columns, in float32, if there is one."""
        if weight is None or weight in self._vectors:
            return None if weight is None else self._vectors[weight]
        return DeviceMemory(self._loader.device, 0, 4 * padded(prod(weight.shape)), None)

    def load(self, use: WeightUse, progress: Progress | None) -> PackedWeight:
        """Packs a weight."""
        weight, planned = use.weight, self.planned(use)
        if use.is_float:
            self._vectors[weight] = self._loader.floats(use)
        else:
            self._matrices[weight] = matrix = self._loader.matrix(weight)
            planned = replace(planned, kernel_type=matrix.format, n_bytes=matrix.n_bytes)
        weight.drop_pages()
        if progress is not None:
            progress(weight)
        return planned

    def planned(self, use: WeightUse) -> PackedWeight:
        """The bytes of a weight; rows of a table are decoded where they are packed."""
        weight = use.weight
        if use.is_float:
            n_rows, n_columns = use.float_shape
            return use.packed("F32", 4 * n_rows * padded(n_columns))
        matrix = self._loader.planned(weight)
        return use.packed(matrix.format, matrix.n_bytes)
