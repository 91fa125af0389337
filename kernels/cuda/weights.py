"""Weights on a CUDA device: rows of the file are uploaded unchanged, and packed on the device.

    file ──threads──▶ pinned memory ──bus──▶ raw rows ──`pack`──▶ packed matrix
                      two buffers            two buffers

Uploads and packing use separate streams.  While the rows of one buffer are packed, the other buffer is uploaded.  The
host reads the next rows as soon as its buffer was copied, and drops the file's pages afterwards.  So neither the host
nor the device holds more than two buffers of a tensor in the file's format.
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
from localllm.kernels.cuda.module import with_arguments
from localllm.kernels.graph import Weight
from localllm.quant.lut import block_size
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target

#: Bytes of rows per upload, or one group of rows if that is larger; and maximum threads that read rows.
CHUNK_BYTES, READERS = 8 << 20, 4
#: Bytes of a file that are read before its pages are dropped.
KEPT_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One matrix, or consecutive matrices of experts, in tiles (`localllm.kernels.cuda.matmul`)."""

    memory: DeviceMemory
    packed: PackedFormat
    n_in: int
    n_out: int
    name: str  # name in the file

    @property
    def format(self) -> str:
        return self.packed.name

    @property
    def n_bytes(self) -> int:
        return self.memory.n_bytes


@dataclass(frozen=True, eq=False)
class _Staging:
    """A host buffer, which is free after its upload, and a device buffer, which is free after packing."""

    host: NDArray[np.uint8]
    device: DeviceMemory
    uploaded: Event
    packed: Event


class CUDAWeightLoader:
    """Loads weights to a device, one at a time."""

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
        """Free the buffers for loading; later loads allocate them again."""
        self._staging = ()
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None

    def planned(self, weight: Weight) -> PackedMatrix:
        """Return the result of `matrix`, without memory."""
        return self._matrix(weight, packed_format(repack_target(weight.type), self._capability))

    def _matrix(self, weight: Weight, format: PackedFormat, memory: DeviceMemory | None = None) -> PackedMatrix:
        *_, n_out, n_in = weight.shape
        memory = memory or DeviceMemory(self.device, 0, _packed_bytes(weight.shape, format), None)
        return PackedMatrix(memory, format, n_in, n_out, weight.name)

    def floats(self, use: WeightUse) -> DeviceMemory:
        """Return a vector, or the rows or columns of a matrix, in zero-padded float32."""
        values = use.floats()
        wide = np.pad(values, ((0, 0), (0, padded(values.shape[1]) - values.shape[1])))
        memory = self._driver.allocate(self.device, wide.nbytes)
        self._driver.upload(memory, wide, self._stream)
        self._driver.synchronize(self._stream)
        return memory

    def matrix(self, weight: Weight) -> PackedMatrix:
        """Return the tiles of one or several matrices, in the planned format or in a fallback format."""
        format = packed_format(repack_target(weight.type), self._capability)
        try:
            return self._matrix(weight, format, self._pack(weight, format))
        except ScaleRangeError:
            format = packed_format(FALLBACK, self._capability)
            return self._matrix(weight, format, self._pack(weight, format))

    def _pack(self, weight: Weight, format: PackedFormat) -> DeviceMemory:
        packed = self._driver.allocate(self.device, _packed_bytes(weight.shape, format))
        matrices = matrices_to_pack(weight, GROUP)
        n_bytes = packed.n_bytes // len(matrices)
        for i, rows in enumerate(matrices):
            self._pack_rows(weight, rows, format, packed.at(i * n_bytes, n_bytes))
        return packed

    def _pack_rows(self, weight: Weight, rows: NDArray[np.uint8], format: PackedFormat, packed: DeviceMemory) -> None:
        driver, n_out, n_in = self._driver, len(rows), weight.shape[-1]
        row_bytes = block_size(format.type).row_bytes(n_in)
        module = driver.load_module(self.device, "pack", format.defines)
        chunk_rows = max(1, self._chunk_bytes // (GROUP * row_bytes)) * GROUP
        staging = self._staging_of(min(chunk_rows, n_out) * row_bytes)
        kept_rows = chunk_rows * max(1, KEPT_BYTES // (chunk_rows * row_bytes))
        try:
            for i, first in enumerate(range(0, n_out, chunk_rows)):
                buffers, n = staging[i % 2], min(chunk_rows, n_out - first)
                driver.synchronize(buffers.uploaded)
                self._read(weight, format, rows[first : first + n], buffers.host[: n * row_bytes].reshape(n, -1))
                if (first + n) % kept_rows == 0:
                    weight.drop_pages()
                raw = buffers.device.at(0, n * row_bytes)
                driver.wait(self._uploads, buffers.packed)
                driver.upload(raw, buffers.host[: n * row_bytes], self._uploads)
                driver.record(buffers.uploaded, self._uploads)
                driver.wait(self._stream, buffers.uploaded)
                begin, end = (format.packed_bytes(rows, n_in) for rows in (first, first + n))
                launch = with_arguments(
                    pack_launch(format, n, n_in),
                    rows=raw, packed=packed.at(begin, end - begin), n_rows=n, row_bytes=row_bytes, n_in=n_in,
                    n_tiles=format.n_tiles(n_in),
                )  # fmt: skip
                driver.launch(module, launch.kernel, launch.grid, launch.block, launch.arguments, self._stream)
                driver.record(buffers.packed, self._stream)
        finally:
            for stream in (self._uploads, self._stream):
                driver.synchronize(stream)  # the memory must not be freed before

    def _staging_of(self, n_bytes: int) -> tuple[_Staging, ...]:
        """Return two buffers of at least ``n_bytes``."""
        if not self._staging or self._staging[0].device.n_bytes < n_bytes:
            self._staging = ()
            n_bytes = max(n_bytes, self._chunk_bytes)
            driver, device = self._driver, self.device
            buffers = ((driver.pinned(n_bytes), driver.allocate(device, n_bytes)) for _ in range(2))
            self._staging = tuple(_Staging(*both, driver.event(device), driver.event(device)) for both in buffers)
        return self._staging

    def _read(self, weight: Weight, format: PackedFormat, rows: NDArray[np.uint8], to: NDArray[np.uint8]) -> None:
        """Read rows of the file into pinned memory, in the format's blocks, with several threads."""

        def share(chunk: slice) -> None:
            to[chunk] = repack(rows[chunk], weight.type, format.type)

        if self._readers is None:
            self._readers = ThreadPoolExecutor(min(READERS, default_threads()), "localllm-upload")
        list(self._readers.map(share, _parts(len(rows), READERS)))


def _packed_bytes(shape: Sequence[int], format: PackedFormat) -> int:
    """Return the bytes of one packed matrix [n_out, n_in] or several."""
    *n_experts, n_out, n_in = shape
    return prod(n_experts) * format.packed_bytes(n_out, n_in)


def _parts(n: int, most: int) -> Iterator[slice]:
    """Divide ``n`` rows into at most ``most`` parts of about equal size."""
    bounds = sorted({i * n // most for i in range(most + 1)})
    return (slice(start, stop) for start, stop in pairwise(bounds))


class CUDAPackedWeights:
    """The weights of a graph for kernels; for weights that are not loaded yet, their planned form."""

    def __init__(self, loader: CUDAWeightLoader) -> None:
        self._loader = loader
        self._matrices: dict[Weight, PackedMatrix] = {}
        self._vectors: dict[Weight, DeviceMemory] = {}

    def matrix(self, weight: Weight) -> PackedMatrix:
        if weight not in self._matrices:
            self._matrices[weight] = self._loader.planned(weight)
        return self._matrices[weight]

    def vector(self, weight: Weight | None) -> DeviceMemory | None:
        """Return a vector, or the rows or columns of a matrix, in float32; None without a weight."""
        if weight is None or weight in self._vectors:
            return None if weight is None else self._vectors[weight]
        return DeviceMemory(self._loader.device, 0, 4 * padded(prod(weight.shape)), None)

    def load(self, use: WeightUse, progress: Progress | None) -> PackedWeight:
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
        """Return the bytes of a weight; rows of a table are decoded on the device that stores them."""
        weight = use.weight
        if use.is_float:
            n_rows, n_columns = use.float_shape
            return use.packed("F32", 4 * n_rows * padded(n_columns))
        matrix = self._loader.planned(weight)
        return use.packed(matrix.format, matrix.n_bytes)
