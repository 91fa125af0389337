"""Formats that no file has: what the kernels read in place of the formats with codebooks.

Every value of those formats is one of at most 16 small integers times a scale, in IQ1 and IQ2 one of six.  So a code
of four or three bits that picks one of 16 or 8 int8 values from a table, and a float16 scale for each 32 or 16
columns, hold them all, at 3.5 to 5 bits a weight; kernels look the codes up in a vector register.  A block of 32
columns with codes of four bits is that of IQ4_NL, which is such a format itself::

    d   f16 [1 or 2]   scale of all 32 columns, or of each 16
    qs  u8[16]         codes, 4 bits, 2 planes of 16
        or u32[3]      codes, 3 bits, as `localllm.quant.bit_packing` has them

`localllm.quant.repack` writes these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from localllm.quant.bit_packing import unpack_words
from localllm.quant.bits import Bytes, Floats
from localllm.quant.types import BLOCK_SIZES, BlockSize, GGMLType

#: Columns in a block.
BLOCK_LENGTH = 32


@dataclass(frozen=True)
class LUTType:
    """A format with a look-up table."""

    name: str
    # the int8 values of the codes, 16 or 8.  The second half's are the first's with the other sign (in IQ1: shifted
    # down instead of up), so that a sign is the highest bit of the code.
    table: tuple[int, ...]
    scale_length: int  # columns that share a scale, 32 or 16

    @property
    def bits(self) -> int:
        """Of a code."""
        return len(self.table).bit_length() - 1

    @property
    def n_scales(self) -> int:
        """Scales in a block."""
        return BLOCK_LENGTH // self.scale_length

    @property
    def size(self) -> BlockSize:
        return BlockSize(BLOCK_LENGTH, 2 * self.n_scales + BLOCK_LENGTH * self.bits // 8)


def _with_negatives(*magnitudes: int) -> tuple[int, ...]:
    """A table of these values and then their negatives."""
    return magnitudes + tuple(-m for m in magnitudes)


# The numbers in the codebooks, of which IQ1's are in eighths: 8 g + 1 and 8 g - 1 for g in -1, 0, 1.
_IQ1 = (-7, 1, 9, 0, -9, -1, 7, 0)
_IQ2 = _with_negatives(8, 25, 43, 0)
_TERNARY = _with_negatives(0, 1, 2, 0)
_E2M1 = _with_negatives(0, 1, 2, 3, 4, 6, 8, 12)  # doubled; the code is that of the file

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

#: What packed weights can be in.
KernelType: TypeAlias = GGMLType | LUTType


def block_size(type: KernelType) -> BlockSize:
    return type.size if isinstance(type, LUTType) else BLOCK_SIZES[type]


def dequantize_lut(data: Bytes, type: LUTType) -> Floats:
    """Decodes rows of blocks, uint8 [..., row_bytes], to float32 [..., n]."""
    blocks = np.ascontiguousarray(data).reshape(-1, type.size.n_bytes)
    fields = blocks.view(np.dtype([("d", "<f2", (type.n_scales,)), ("qs", "u1", (4 * type.bits,))]))[:, 0]
    codes = np.concatenate([fields["qs"] & 15, fields["qs"] >> 4], axis=1)
    if type.bits == 3:
        codes = unpack_words(np.ascontiguousarray(fields["qs"]).view("<u4"), 3).view(np.uint8)
    values: Floats = np.array(type.table, np.float32)[codes]
    with np.errstate(all="ignore"):  # as every decoder: a scale may be infinite or NaN
        values *= np.repeat(fields["d"].astype(np.float32), type.scale_length, axis=1)
    return values.reshape(*data.shape[:-1], -1)
