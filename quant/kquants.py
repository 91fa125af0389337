"""K formats: 256 values per block, in sub-blocks of 16 or 32 whose scales are integers.

Codes are stored in bit planes (`bit_planes`): in a run of k bytes, the lowest bits are the run's first
k codes, the next bits the next k codes, and so on. The drawings show runs and planes as ``runs × k``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from localllm.quant.bits import Bytes, Ints, bit_planes, join_bit_planes
from localllm.quant.block_format import PackableFormat
from localllm.quant.types import GGMLType

BLOCK_LENGTH = 256


def _unpack_planes(data: Bytes, run: int, width: int) -> Bytes:
    """Unpack uint8 [n_blocks, bytes], in runs of ``run`` bytes, to codes [n_blocks, 256] of ``width`` bits."""
    return bit_planes(data.reshape(len(data), -1, run), width).reshape(len(data), BLOCK_LENGTH)


class PlaneFormat(PackableFormat):
    """A format whose codes are stored in bit planes."""

    # (field, bytes of a run, bits per code), the field with the highest bits first
    planes: ClassVar[tuple[tuple[str, int, int], ...]]

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        (name, run, width), *lower = self.planes
        codes = _unpack_planes(block[name], run, width)
        for name, run, width in lower:
            codes <<= width
            codes |= _unpack_planes(block[name], run, width)
        return codes

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        for name, run, width in reversed(self.planes):
            planes = (codes & ((1 << width) - 1)).reshape(len(codes), -1, 8 // width, run)
            block[name] = join_bit_planes(planes, width).reshape(len(codes), -1)
            codes = codes >> width


class _SixBitScales(PlaneFormat):
    """Q4_K and Q5_K: eight 6-bit sub-scales A..H and sub-minima a..h in twelve bytes::

    byte  0: EEAAAAAA    byte  4: eeaaaaaa    byte  8: eeeeEEEE   (the lower four bits of e and E;
    byte  1: FFBBBBBB    byte  5: ffbbbbbb    byte  9: ffffFFFF    bytes 0 and 4 hold the upper two)
    byte  2: GGCCCCCC    byte  6: ggcccccc    byte 10: ggggGGGG
    byte  3: HHDDDDDD    byte  7: hhdddddd    byte 11: hhhhHHHH
    """

    sub_length = 32

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        first, second, third = np.split(block["scales"], 3, axis=1)
        sub_scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
        sub_mins = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
        return sub_scales, sub_mins

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Ints, sub_mins: Ints) -> None:
        first = sub_scales[:, :4] | (sub_scales[:, 4:] >> 4 << 6)
        second = sub_mins[:, :4] | (sub_mins[:, 4:] >> 4 << 6)
        third = (sub_scales[:, 4:] & 15) | (sub_mins[:, 4:] << 4)
        block["scales"] = np.concatenate([first, second, third], axis=1)


class Q2_K(PlaneFormat):
    """value = d · S · code - dmin · M, code in 0..3, S and M of 16 values in 0..15::

    scales  u8[16]   sub-block s: MMMMSSSS
    qs      u8[64]   codes, 2 bits, 2 × 32
    d       f16
    dmin    f16
    """

    type = GGMLType.Q2_K
    layout = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
    sub_length = 16
    planes = (("qs", 32, 2),)

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        return block["scales"] & 15, block["scales"] >> 4

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Ints, sub_mins: Ints) -> None:
        block["scales"] = sub_scales | sub_mins << 4


class Q3_K(PlaneFormat):
    """value = d · S · (code - 4), code in 0..7, S of 16 values in -32..31::

    hmask   u8[32]   third bits of the codes, 1 × 32
    qs      u8[64]   lower two bits of the codes, 2 × 32
    scales  u8[12]   S + 32 of the 16 sub-blocks A..P, 6 bits each
    d       f16

    Bytes 0..7 of ``scales`` hold the lower four bits, 1 × 8. Bytes 8..11 hold the upper two, 1 × 4::

        byte 0: IIIIAAAA   …   byte 7: PPPPHHHH     byte 8: MMIIEEAA   …   byte 11: PPLLHHDD
    """

    type = GGMLType.Q3_K
    layout = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
    offset = 4
    sub_length = 16
    planes = ("hmask", 32, 1), ("qs", 32, 2)

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints, None]:
        low = bit_planes(block["scales"][:, :8], 4).reshape(len(block), 16)
        high = bit_planes(block["scales"][:, 8:], 2).reshape(len(block), 16)
        return (low | high << 4).view(np.int8) - np.int8(32), None

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Ints, sub_mins: None) -> None:
        scales = (sub_scales + 32).astype(np.uint8)
        block["scales"][:, :8] = join_bit_planes((scales & 15).reshape(-1, 2, 8), 4)
        block["scales"][:, 8:] = join_bit_planes((scales >> 4).reshape(-1, 4, 4), 2)


class Q4_K(_SixBitScales):
    """value = d · S · code - dmin · M, code in 0..15, S and M of 32 values in 0..63::

    d       f16
    dmin    f16
    scales  u8[12]    S and M, 6 bits each (drawn at `_SixBitScales`)
    qs      u8[128]   codes, 4 bits, 4 × 32
    """

    type = GGMLType.Q4_K
    layout = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])

    planes = (("qs", 32, 4),)


class Q5_K(_SixBitScales):
    """value = d · S · code - dmin · M, code in 0..31, S and M of 32 values in 0..63::

    d       f16
    dmin    f16
    scales  u8[12]    S and M, 6 bits each (drawn at `_SixBitScales`)
    qh      u8[32]    fifth bits of the codes, 1 × 32
    qs      u8[128]   lower four bits of the codes, 4 × 32
    """

    type = GGMLType.Q5_K
    layout = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])

    planes = ("qh", 32, 1), ("qs", 32, 4)


class Q6_K(PlaneFormat):
    """value = d · S · (code - 32), code in 0..63, S of 16 values in -128..127::

    ql      u8[128]   lower four bits of the codes, 2 × 64
    qh      u8[64]    upper two bits of the codes, 2 × 32
    scales  i8[16]    S
    d       f16
    """

    type = GGMLType.Q6_K
    layout = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
    offset = 32
    sub_length = 16
    planes = ("qh", 32, 2), ("ql", 64, 4)

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints, None]:
        return np.ascontiguousarray(block["scales"]), None

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Ints, sub_mins: None) -> None:
        block["scales"] = sub_scales
