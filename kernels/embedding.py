"""Embedding tables: matrices whose rows are looked up by token id, in the process's memory.

After the model is loaded, tables are not read from the mapped file: a program that overwrites or shortens the file
would change the text, or crash this process. Tables of n-grams are larger than memory and are read from the file with
ordinary reads.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch
from localllm.kernels.graph import Weight
from localllm.kernels.mapped_file import OpenFile, range_in_file
from localllm.kernels.operations import NgramEmbed
from localllm.quant.formats import dequantize
from localllm.quant.lut import KernelType, LUTType, dequantize_lut
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType

#: Bytes of the file that are copied at once, before their pages are released.
_COPIED_BYTES = 16 << 20
#: Maximum number of values of a table that is decoded when loaded.
SMALL_TABLE = 1 << 20


class EmbeddingTable(Protocol):
    """A matrix [n_vocab, d] whose rows can be looked up."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return rows ``ids`` [n], which must be in the table: float32 [n, d], a new array."""


@dataclass(frozen=True)
class CopiedTable:
    """A table in the file's format."""

    type: GGMLType
    shape: tuple[int, int]
    data: NDArray[np.uint8]  # [n_vocab, bytes of a row]

    @classmethod
    def of(cls, weight: Weight) -> CopiedTable:
        """Copy a tensor from its file."""
        n_rows, n_columns = weight.shape
        data = weight.data.reshape(n_rows, -1)
        copy = np.empty_like(data)
        step = max(1, _COPIED_BYTES // data.shape[1])
        for start in range(0, n_rows, step):
            copy[start : start + step] = data[start : start + step]
            weight.drop_pages()
        return cls(weight.type, (n_rows, n_columns), copy)

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return dequantize(self.data[ids], self.type)


@dataclass(frozen=True)
class DecodedTable:
    """A small decoded table. Decoding a row takes longer than a whole layer of a small model."""

    values: NDArray[np.float32]  # [n_vocab, d]

    @classmethod
    def of(cls, weight: Weight) -> DecodedTable:
        return cls(dequantize(weight.data, weight.type).reshape(weight.shape))

    @property
    def shape(self) -> tuple[int, int]:
        n_vocab, width = self.values.shape
        return n_vocab, width

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return self.values[ids]


@dataclass(frozen=True)
class PackedTable:
    """A table that is also the output matrix (tied embeddings), in packed form. It needs no further memory."""

    type: KernelType
    shape: tuple[int, int]
    packed: NDArray[np.uint8]

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        blocks = LAYOUTS[self.type].unpack_rows(self.packed, self.shape[1], ids)
        return dequantize_lut(blocks, self.type) if isinstance(self.type, LUTType) else dequantize(blocks, self.type)


class FileTable:
    """A table whose rows are read from its file on every lookup, or from memory if it is not in a file."""

    def __init__(self, weight: Weight) -> None:
        self.name, self.type, (n_rows, n_columns) = weight.name, weight.type, weight.shape
        self.shape = n_rows, n_columns
        data = weight.data.reshape(n_rows, -1)
        self._row_bytes, self._file_range = data.shape[1], range_in_file(data)
        self._data = data if self._file_range is None else np.zeros((0, 0), np.uint8)
        self._file = None if self._file_range is None else OpenFile(self._file_range.path)
        if self._file is not None:
            weakref.finalize(self, self._file.file.close).atexit = False

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `EmbeddingTable.rows`. Raises GGUFError if reading fails or the file has changed."""
        numbers, inverse = np.unique(ids, return_inverse=True)
        if self._file is None or self._file_range is None:
            return dequantize(self._data[numbers], self.type)[inverse]
        data = np.empty((len(numbers), self._row_bytes), np.uint8)
        for row, number in zip(data, numbers.tolist(), strict=True):
            self._file.fill(
                row, self._file_range.offset + number * self._row_bytes, f"tensor {self.name}, row {number}"
            )
        return dequantize(data, self.type)[inverse]


class NgramRows:
    """Computes `NgramEmbed`, with the table's file open."""

    def __init__(self, op: NgramEmbed) -> None:
        self.op, self._table = op, FileTable(op.table)

    def rows(self, batch: Batch, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows of a batch [T, heads * d]. Updates the last ids in ``states`` [n_states, n - 1]."""
        op, n = self.op, states.shape[1]
        numbers = np.empty((len(batch.ids), len(op.sizes)), np.int64)
        for s, (start, stop, _) in enumerate(batch.sequences()):
            state, ids = states[batch.states[s]], batch.ids[start:stop]
            n_known = min(int(batch.positions[start]), n)
            numbers[start:stop] = op.numbers(state[n - n_known :], ids)
            state[:] = np.concatenate([state, ids])[-n:]
        return self._table.rows(numbers.reshape(-1)).reshape(len(numbers), -1)
