"""Weights in memory for CPU kernels: threads pack a file's rows into tiles, some hundred rows at a time."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import PackedWeight, Progress, WeightUse, matrices_to_pack
from localllm.kernels.buffers import Buffer
from localllm.kernels.cpu.expert_pool import ExpertPool, stays_in_file
from localllm.kernels.cpu.host import check_memory
from localllm.kernels.cpu.memory import PADDING, Arena, padded
from localllm.kernels.cpu.packing import PACKED_ROWS, Packer
from localllm.kernels.cpu.program import Job, Workers
from localllm.kernels.cpu.target import Target
from localllm.kernels.embedding import SMALL_TABLE, CopiedTable, DecodedTable, EmbeddingTable, PackedTable
from localllm.kernels.graph import Weight
from localllm.quant.lut import KernelType
from localllm.quant.packing import LAYOUTS
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target

#: Bytes of a matrix that are packed before its file pages are dropped: the largest matrix would need twice its
#: memory.
KEPT_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class LoadedWeight:
    packed: PackedWeight
    # tiles in the format ``format``, or float32 without a format; None if only rows are looked up
    array: NDArray[Any] | None = None
    format: KernelType | None = None
    table: EmbeddingTable | None = None  # for looking up rows


class CPUWeightLoader:
    def __init__(self, workers: Workers, target: Target, progress: Callable[[int, int], None] | None) -> None:
        self._workers, self._target, self._progress = workers, target, progress
        self._packers: dict[KernelType, Packer] = {}
        self._memory = Arena()
        #: Weights in memory of any step; another step with the same use shares the weight.
        self.loaded = WeakValueDictionary[WeightUse, LoadedWeight]()

    def pack(self, weight: Weight) -> tuple[NDArray[np.uint8], KernelType]:
        """Return the tiles of one or several matrices, and their format: the planned one, or a fallback."""
        format = repack_target(weight.type)
        try:
            return self._pack(weight, format), format
        except ScaleRangeError:
            n_bytes = packed_bytes(weight.shape, FALLBACK)
            purpose = f"for tensor {weight.name}, whose scales do not fit float16 and need {FALLBACK.name},"
            check_memory(n_bytes, purpose)
            return self._pack(weight, FALLBACK), FALLBACK

    def _pack(self, weight: Weight, format: KernelType) -> NDArray[np.uint8]:
        packed = self._memory.take(packed_bytes(weight.shape, format))
        matrices = matrices_to_pack(weight, PADDING)
        try:
            for rows, tiles in zip(matrices, packed.reshape(len(matrices), -1), strict=True):
                self._pack_rows(weight, rows, format, tiles)
        except ScaleRangeError:
            self._memory.take_back()
            raise
        return packed

    def _pack_rows(
        self, weight: Weight, rows: NDArray[np.uint8], format: KernelType, packed: NDArray[np.uint8]
    ) -> None:
        n_out, n_in, layout = len(rows), weight.shape[-1], LAYOUTS[format]
        packer = self.packer(format)
        kept_rows = PACKED_ROWS * max(1, KEPT_BYTES // (PACKED_ROWS * rows.shape[1]))
        firsts = itertools.count(0, PACKED_ROWS)  # ``next`` is atomic in Python, so threads can share the counter
        given_up = threading.Event()

        def share(*_: int) -> None:
            while (first := next(firsts)) < n_out and not given_up.is_set():
                if first % kept_rows == 0:
                    weight.drop_pages()  # pages that another thread still reads are loaded from the file again
                try:
                    repacked = repack(rows[first : first + PACKED_ROWS], weight.type, format)
                except ScaleRangeError:
                    given_up.set()
                    raise
                start, stop = (layout.packed_bytes(n, n_in) for n in (first, first + len(repacked)))
                packer.pack(repacked, packed[start:stop])

        self._workers.run(Job(share, 0))

    def packer(self, format: KernelType) -> Packer:
        if format not in self._packers:
            self._packers[format] = Packer(LAYOUTS[format], self._target, self._progress)
        return self._packers[format]


class CPUPackedWeights:
    """The weights of a graph for kernels; for weights that are not loaded yet, their planned form."""

    def __init__(self, pool: ExpertPool | None = None) -> None:
        #: Pool of the experts that stay in the file; None if all weights are loaded.
        self.pool = pool
        self._loaded: dict[Weight, LoadedWeight] = {}
        self._expert_tables: dict[Weight, NDArray[np.int64]] = {}
        self._in_file: dict[Weight, bool] = {}
        #: Addresses of loaded weights.
        self._places = defaultdict[Weight, Buffer](lambda: Buffer(0, address=0))
        #: Weights whose rows are looked up.
        self.tables: dict[Weight, EmbeddingTable] = {}

    def matrix(self, weight: Weight) -> tuple[Buffer, KernelType]:
        """Return the tiles of one or several matrices, and their format."""
        format = self._loaded[weight].format if weight in self._loaded else None
        return self._places[weight], repack_target(weight.type) if format is None else format

    def experts(self, weight: Weight) -> NDArray[np.int64]:
        """Return the address of each expert's tiles, int64 [n_experts]; 0 if not in memory."""
        return self._expert_tables.setdefault(weight, np.zeros(weight.shape[0], np.int64))

    def stays_in_file(self, weight: Weight) -> bool:
        """Return whether the experts of a weight can stay in its file, which may be closed after the first call."""
        if weight not in self._in_file:
            self._in_file[weight] = stays_in_file(weight) is not None
        return self._in_file[weight]

    def vector(self, weight: Weight | None) -> Buffer | int:
        """Return a vector, or the rows or columns of a matrix, in zero-padded float32; 0 if None."""
        return 0 if weight is None else self._places[weight]

    def arrays(self) -> list[NDArray[Any]]:
        """Return the memory of the loaded weights."""
        return [weight.array for weight in self._loaded.values() if weight.array is not None]

    def load(self, use: WeightUse, loader: CPUWeightLoader, progress: Progress | None) -> PackedWeight:
        """Pack a weight, unless another step already has."""
        weight, shared = use.weight, loader.loaded.get(use)
        if self.pool is not None and (planned := planned_weight(use, pooled=True)).is_in_file:
            if progress is not None:
                progress(weight)
            return planned
        loaded = shared or _load(use, loader)
        self._loaded[weight] = loader.loaded[use] = loaded
        if use.is_table:  # a drafter may need only its table
            loader.loaded[use.as_table()] = loaded
        if loaded.array is not None:
            self._places[weight].address = loaded.array.ctypes.data
            if use.is_expert:
                n = weight.shape[0]
                self.experts(weight)[:] = loaded.array.ctypes.data + np.arange(n) * (loaded.array.nbytes // n)
        if loaded.table is not None:
            self.tables[weight] = loaded.table
        weight.drop_pages()
        if progress is not None:
            progress(weight)
        if shared is None:
            return loaded.packed
        # If the layer differs, this step only looks up rows, and another step multiplies the weight.
        is_same = loaded.packed.layer == use.layer
        return replace(loaded.packed if is_same else planned_weight(use), is_shared=True)


def _load(use: WeightUse, loader: CPUWeightLoader) -> LoadedWeight:
    weight, planned = use.weight, planned_weight(use)
    array: NDArray[Any] | None = None
    format: KernelType | None = None
    table: EmbeddingTable | None = None
    if use.is_float:
        values = use.floats()
        array = np.zeros((len(values), padded(values.shape[1])), np.float32)
        array[:, : values.shape[1]] = values
    elif use.is_operand:
        array, format = loader.pack(weight)
        n_bytes = planned.n_bytes + array.nbytes - packed_bytes(weight.shape, repack_target(weight.type))
        planned = replace(planned, kernel_type=format.name, n_bytes=n_bytes)
    if use.is_table:
        n_rows, n_columns = weight.shape
        if n_rows * n_columns <= SMALL_TABLE:
            table = DecodedTable.of(weight)
        elif array is None or format is None:
            table = CopiedTable.of(weight)
        else:
            table = PackedTable(format, (n_rows, n_columns), array)
    return LoadedWeight(planned, array, format, table)


def planned_weight(use: WeightUse, *, pooled: bool = False) -> PackedWeight:
    """Return the bytes of a packed weight; ``pooled``: whether experts stay in the file if possible."""
    weight = use.weight
    kernel_type, n_bytes = "F32", 0
    if use.is_float:
        n_rows, n_columns = use.float_shape
        n_bytes = 4 * n_rows * padded(n_columns)
    elif use.is_operand:
        format = repack_target(weight.type)
        kernel_type, n_bytes = format.name, packed_bytes(weight.shape, format)
    if use.is_table and prod(weight.shape) <= SMALL_TABLE:
        n_bytes += 4 * prod(weight.shape)
    elif use.is_table and not use.is_operand:
        kernel_type, n_bytes = weight.type.name, weight.data.nbytes
    is_in_file = pooled and use.is_expert and stays_in_file(weight) is not None
    return use.packed(kernel_type, n_bytes, is_in_file=is_in_file)


def packed_bytes(shape: Sequence[int], format: KernelType) -> int:
    """Return the bytes of one packed matrix [n_out, n_in] or several."""
    *n_experts, n_out, n_in = shape
    return prod(n_experts) * LAYOUTS[format].packed_bytes(padded(n_out), n_in)
