"""Embedding tables: rows of a matrix, looked up by token id, from memory that is the process's own.

A table is never read from the mapped file once the model is loaded: a file that another program overwrites or
shortens would change the text, or end the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.graph import Weight
from localllm.quant.formats import dequantize
from localllm.quant.lut import KernelType, LUTType, dequantize_lut
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType

#: Bytes of the file copied at once, whose pages are then let go.
_COPIED_BYTES = 16 << 20
#: Values of a table that is small enough to be decoded.
SMALL_TABLE = 1 << 20


class EmbeddingTable(Protocol):
    """A matrix [n_vocab, d] of which single rows are wanted."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The rows of ``ids`` [n], which must be in the table: float32 [n, d], a new array."""
        ...


@dataclass(frozen=True)
class CopiedTable:
    """A table in the blocks that its file has."""

    type: GGMLType
    shape: tuple[int, int]
    data: NDArray[np.uint8]  # [n_vocab, bytes of a row]

    @classmethod
    def of(cls, weight: Weight) -> CopiedTable:
        """Copies a tensor out of its file."""
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
    """A small table, decoded once: decoding a row takes longer than small models have for a whole layer."""

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
    """A table that is an output matrix as well (tied embeddings), packed for it: it takes no memory of its own."""

    type: KernelType
    shape: tuple[int, int]
    packed: NDArray[np.uint8]

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        blocks = LAYOUTS[self.type].unpack_rows(self.packed, self.shape[1], ids)
        return dequantize_lut(blocks, self.type) if isinstance(self.type, LUTType) else dequantize(blocks, self.type)
