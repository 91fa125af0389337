"""GGML's first formats: 32 values per block, one f16 scale, and an f16 minimum in the ``_1`` formats.

4-bit codes are stored in two planes of 16. The fifth bits of 5-bit codes are stored in one 32-bit word::

    qs, byte j:   7 6 5 4 3 2 1 0          qh, bit j:  fifth bit of code j
                  └─────┘ └─────┘
            code j + 16   code j
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.quant.bits import Ints, bit_planes, join_bit_planes
from localllm.quant.block_format import PackableFormat
from localllm.quant.types import GGMLType

BLOCK_LENGTH = 32


class _FourBits(PackableFormat):
    """Formats whose codes are all in ``qs``."""

    sub_length = BLOCK_LENGTH

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        return bit_planes(block["qs"], 4).reshape(len(block), BLOCK_LENGTH)

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        block["qs"] = join_bit_planes((codes & 15).reshape(len(codes), 2, 16), 4)


class _FiveBits(_FourBits):
    """Formats whose codes have their fifth bits in ``qh``."""

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        codes = super().unpack_codes(block)
        codes |= np.unpackbits(block["qh"], axis=-1, bitorder="little") << np.uint8(4)
        return codes

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        super().pack_codes(block, codes)
        block["qh"] = np.packbits(codes & 16, axis=-1, bitorder="little")


class Q4_0(_FourBits):
    """value = d · (code - 8), code in 0..15::

    d   f16
    qs  u8[16]   codes
    """

    type = GGMLType.Q4_0
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
    offset = 8


class Q4_1(_FourBits):
    """value = d · code + m, code in 0..15::

    d   f16
    m   f16
    qs  u8[16]   codes
    """

    type = GGMLType.Q4_1
    layout = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])


class Q5_0(_FiveBits):
    """value = d · (code - 16), code in 0..31::

    d   f16
    qh  u8[4]    fifth bits
    qs  u8[16]   lower four bits
    """

    type = GGMLType.Q5_0
    layout = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
    offset = 16


class Q5_1(_FiveBits):
    """value = d · code + m, code in 0..31::

    d   f16
    m   f16
    qh  u8[4]    fifth bits
    qs  u8[16]   lower four bits
    """

    type = GGMLType.Q5_1
    layout = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])


class Q8_0(PackableFormat):
    """value = d · code, code in -128..127 (encoders use -127..127)::

    d   f16
    qs  i8[32]   codes, in order
    """

    type = GGMLType.Q8_0
    layout = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
    sub_length = BLOCK_LENGTH

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        return np.ascontiguousarray(block["qs"])

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        block["qs"] = codes
