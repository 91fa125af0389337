"""GGML's tensor types: ids, block lengths and block sizes (ggml.h, ``enum ggml_type``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self


@dataclass(frozen=True, slots=True)
class BlockSize:
    """How a type stores a row: ``length`` values in ``n_bytes`` bytes."""

    length: int
    n_bytes: int

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of ``n`` values; ``n`` must be a multiple of ``length``."""
        return n // self.length * self.n_bytes


class GGMLType(IntEnum):
    """Tensor type ids as stored in GGUF files. Each is followed by the values and the bytes of a block."""

    block: BlockSize

    def __new__(cls, id: int, length: int = 1, n_bytes: int = 0) -> Self:  # `GGMLType(id)` gives no sizes
        self = int.__new__(cls, id)
        self._value_, self.block = id, BlockSize(length, n_bytes)
        return self

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18


BLOCK_SIZES: dict[GGMLType, BlockSize] = {type: type.block for type in GGMLType}
