"""Look-up-table formats: in memory only, read by kernels in place of formats with codebooks.

Every value of a codebook format is a scale times one of at most 16 small integers (six in IQ1 and IQ2). A table of 16
or 8 int8 values, a code of four or three bits per weight and a float16 scale per 32 or 16 columns therefore represent
every such format, at 3.5 to 5 bits per weight. Kernels look the codes up in a vector register. A block of 32 columns
with codes of four bits is laid out like IQ4_NL, a look-up-table format that files also contain::

    d   f16 [1 or 2]   scale of all 32 columns, or of each 16
    qs  u8[16]         codes, 4 bits, 2 planes of 16
        or u32[3]      codes, 3 bits, packed by `localllm.quant.bit_packing`

`localllm.quant.repack` writes these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from localllm.quant.bit_packing import unpack_words
from localllm.quant.bits import Bytes, Floats
from localllm.quant.types import BLOCK_SIZES, BlockSize, GGMLType

#: Columns per block.
BLOCK_LENGTH = 32


@dataclass(frozen=True)
class LUTType:
    """A format with a look-up table."""

    name: str
    # int8 values of the codes, 16 or 8. The second half is the first half with the opposite sign (in IQ1: shifted
    # down instead of up), so that the highest bit of a code is the sign.
    table: tuple[int, ...]
    scale_length: int  # columns that share a scale, 32 or 16

    @property
    def bits(self) -> int:
        """Bits per code."""
        return len(self.table).bit_length() - 1

    @property
    def n_scales(self) -> int:
        """Scales per block."""
        return BLOCK_LENGTH // self.scale_length

    @property
    def size(self) -> BlockSize:
        return BlockSize(BLOCK_LENGTH, 2 * self.n_scales + BLOCK_LENGTH * self.bits // 8)


def _with_negatives(*magnitudes: int) -> tuple[int, ...]:
    """Return a table of ``magnitudes`` followed by their negatives."""
    return magnitudes + tuple(-m for m in magnitudes)


# Integers of the codebooks. Values of IQ1 are in eighths: 8 g + 1 and 8 g - 1 for g in -1, 0, 1.
_IQ1 = (-7, 1, 9, 0, -9, -1, 7, 0)
_IQ2 = _with_negatives(8, 25, 43, 0)
_TERNARY = _with_negatives(0, 1, 2, 0)
_E2M1 = _with_negatives(0, 1, 2, 3, 4, 6, 8, 12)  # doubled; the codes are the same as in the file

LUT_IQ1_32 = LUTType("LUT_IQ1_32", _IQ1, 32)
LUT_IQ1_16 = LUTType("LUT_IQ1_16", _IQ1, 16)
LUT_IQ2_32 = LUTType("LUT_IQ2_32", _IQ2, 32)
LUT_IQ2_16 = LUTType("LUT_IQ2_16", _IQ2, 16)
LUT_IQ3_XXS = LUTType("LUT_IQ3_XXS", _with_negatives(4, 12, 20, 28, 36, 44, 52, 62), 32)
LUT_IQ3_S = LUTType("LUT_IQ3_S", _with_negatives(1, 3, 5, 7, 9, 11, 13, 15), 32)
LUT_TERNARY = LUTType("LUT_TERNARY", _TERNARY, 32)
LUT_E2M1_32 = LUTType("LUT_E2M1_32", _E2M1, 32)
LUT_E2M1_16 = LUTType("LUT_E2M1_16", _E2M1, 16)

LUT_TYPES = (
    LUT_IQ1_32, LUT_IQ1_16, LUT_IQ2_32, LUT_IQ2_16, LUT_IQ3_XXS, LUT_IQ3_S, LUT_TERNARY, LUT_E2M1_32, LUT_E2M1_16
)  # fmt: skip

#: Types of packed weights.
KernelType: TypeAlias = GGMLType | LUTType


def block_size(type: KernelType) -> BlockSize:
    return type.size if isinstance(type, LUTType) else BLOCK_SIZES[type]


def dequantize_lut(data: Bytes, type: LUTType) -> Floats:
    """Decode rows of blocks, uint8 [..., row_bytes], to float32 [..., n]."""
    blocks = np.ascontiguousarray(data).reshape(-1, type.size.n_bytes)
    fields = blocks.view(np.dtype([("d", "<f2", (type.n_scales,)), ("qs", "u1", (4 * type.bits,))]))[:, 0]
    codes = np.concatenate([fields["qs"] & 15, fields["qs"] >> 4], axis=1)
    if type.bits == 3:
        codes = unpack_words(np.ascontiguousarray(fields["qs"]).view("<u4"), 3).view(np.uint8)
    values: Floats = np.array(type.table, np.float32)[codes]
    with np.errstate(all="ignore"):  # a scale may be infinite or NaN, as in all formats
        values *= np.repeat(fields["d"].astype(np.float32), type.scale_length, axis=1)
    return values.reshape(*data.shape[:-1], -1)
