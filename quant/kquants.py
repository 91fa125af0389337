"""The K formats: 256 values a block, in sub-blocks of 16 or 32 whose scales are integers themselves.

Codes are stored in bit planes (`bit_planes`): in a run of k bytes the lowest bits are the run's first
k codes, the next bits the next k codes, and so on.  The drawings give runs and planes as ``runs × k``.
"""

from __future__ import annotations

import numpy as np

from localllm.quant.bits import Bytes, Ints, bit_planes, join_bit_planes
from localllm.quant.block_format import PackableFormat, Parts, register, required
from localllm.quant.types import GGMLType

BLOCK_LENGTH = 256


def _unpack_planes(data: Bytes, run: int, width: int) -> Bytes:
    """uint8 [n_blocks, bytes] in runs of ``run`` bytes to codes [n_blocks, 256] of ``width`` bits."""
    return bit_planes(data.reshape(len(data), -1, run), width).reshape(len(data), BLOCK_LENGTH)


def _pack_planes(codes: Ints, run: int, width: int) -> Bytes:
    """The inverse of `_unpack_planes`."""
    planes = codes.reshape(len(codes), -1, 8 // width, run)
    return join_bit_planes(planes, width).reshape(len(codes), -1)


def _unpack_scales_and_mins(scales: Bytes) -> tuple[Ints, Ints]:
    """The eight 6-bit sub-scales A..H and sub-minima a..h of Q4_K and Q5_K, each uint8 [n_blocks, 8].

    ::

        byte  0: EEAAAAAA    byte  4: eeaaaaaa    byte  8: eeeeEEEE   (the lower four bits of e and E,
        byte  1: FFBBBBBB    byte  5: ffbbbbbb    byte  9: ffffFFFF    whose upper two stand on the left)
        byte  2: GGCCCCCC    byte  6: ggcccccc    byte 10: ggggGGGG
        byte  3: HHDDDDDD    byte  7: hhdddddd    byte 11: hhhhHHHH
    """
    first, second, third = scales[:, 0:4], scales[:, 4:8], scales[:, 8:12]
    sub_scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    sub_mins = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return sub_scales, sub_mins


def _pack_scales_and_mins(parts: Parts) -> Bytes:
    """The inverse of `_unpack_scales_and_mins`: uint8 [n_blocks, 12]."""
    sub_scales = required(parts.sub_scales, "sub-scales")
    sub_mins = required(parts.sub_mins, "sub-minima")
    first = sub_scales[:, :4] | (sub_scales[:, 4:] >> 4 << 6)
    second = sub_mins[:, :4] | (sub_mins[:, 4:] >> 4 << 6)
    third = (sub_scales[:, 4:] & 15) | (sub_mins[:, 4:] << 4)
    return np.concatenate([first, second, third], axis=1)


@register
class Q2_K(PackableFormat):
    """value = d · S · code - dmin · M, code in 0..3, S and M of 16 values in 0..15::

    scales  u8[16]   sub-block s: MMMMSSSS
    qs      u8[64]   codes, 2 bits, 2 × 32
    d       f16
    dmin    f16
    """

    type = GGMLType.Q2_K
    layout = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
    sub_length = 16

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        return Parts(
            codes=_unpack_planes(block["qs"], 32, 2),
            scale=block["d"].astype(np.float16),
            min=block["dmin"].astype(np.float16),
            sub_scales=block["scales"] & 15,
            sub_mins=block["scales"] >> 4,
        )

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["dmin"] = required(parts.min, "dmin")
        block["scales"] = required(parts.sub_scales, "sub-scales") | required(parts.sub_mins, "sub-minima") << 4
        block["qs"] = _pack_planes(parts.codes, 32, 2)
        return blocks


@register
class Q3_K(PackableFormat):
    """value = d · S · (code - 4), code in 0..7, S of 16 values in -32..31::

    hmask   u8[32]   third bits of the codes, 1 × 32
    qs      u8[64]   lower two bits of the codes, 2 × 32
    scales  u8[12]   S + 32 of the 16 sub-blocks A..P, 6 bits each
    d       f16

    Of ``scales``, bytes 0..7 hold the lower four bits, 1 × 8, bytes 8..11 the upper two, 1 × 4::

        byte 0: IIIIAAAA   …   byte 7: PPPPHHHH     byte 8: MMIIEEAA   …   byte 11: PPLLHHDD
    """

    type = GGMLType.Q3_K
    layout = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
    offset = 4
    sub_length = 16

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        codes = _unpack_planes(block["hmask"], 32, 1)
        codes <<= 2
        codes |= _unpack_planes(block["qs"], 32, 2)
        scale = block["d"].astype(np.float16)
        return Parts(codes, scale, sub_scales=self._unpack_scales(block["scales"]))

    @staticmethod
    def _unpack_scales(scales: Bytes) -> Ints:
        low = bit_planes(scales[:, :8], 4).reshape(len(scales), 16)
        high = bit_planes(scales[:, 8:], 2).reshape(len(scales), 16)
        return (low | high << 4).view(np.int8) - np.int8(32)

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["hmask"] = _pack_planes(parts.codes >> 2, 32, 1)
        block["qs"] = _pack_planes(parts.codes & 3, 32, 2)
        scales = (required(parts.sub_scales, "sub-scales") + 32).astype(np.uint8)
        block["scales"][:, :8] = join_bit_planes((scales & 15).reshape(-1, 2, 8), 4)
        block["scales"][:, 8:] = join_bit_planes((scales >> 4).reshape(-1, 4, 4), 2)
        block["d"] = parts.scale
        return blocks


@register
class Q4_K(PackableFormat):
    """value = d · S · code - dmin · M, code in 0..15, S and M of 32 values in 0..63::

    d       f16
    dmin    f16
    scales  u8[12]    S and M, 6 bits each (drawn at `_unpack_scales_and_mins`)
    qs      u8[128]   codes, 4 bits, 4 × 32
    """

    type = GGMLType.Q4_K
    layout = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
    sub_length = 32

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        sub_scales, sub_mins = _unpack_scales_and_mins(block["scales"])
        return Parts(
            codes=_unpack_planes(block["qs"], 32, 4),
            scale=block["d"].astype(np.float16),
            min=block["dmin"].astype(np.float16),
            sub_scales=sub_scales,
            sub_mins=sub_mins,
        )

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["dmin"] = required(parts.min, "dmin")
        block["scales"] = _pack_scales_and_mins(parts)
        block["qs"] = _pack_planes(parts.codes, 32, 4)
        return blocks


@register
class Q5_K(PackableFormat):
    """value = d · S · code - dmin · M, code in 0..31, S and M of 32 values in 0..63::

    d       f16
    dmin    f16
    scales  u8[12]    S and M, 6 bits each (drawn at `_unpack_scales_and_mins`)
    qh      u8[32]    fifth bits of the codes, 1 × 32
    qs      u8[128]   lower four bits of the codes, 4 × 32
    """

    type = GGMLType.Q5_K
    layout = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
    sub_length = 32

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        codes = _unpack_planes(block["qh"], 32, 1)
        codes <<= 4
        codes |= _unpack_planes(block["qs"], 32, 4)
        sub_scales, sub_mins = _unpack_scales_and_mins(block["scales"])
        return Parts(
            codes=codes,
            scale=block["d"].astype(np.float16),
            min=block["dmin"].astype(np.float16),
            sub_scales=sub_scales,
            sub_mins=sub_mins,
        )

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["dmin"] = required(parts.min, "dmin")
        block["scales"] = _pack_scales_and_mins(parts)
        block["qh"] = _pack_planes(parts.codes >> 4, 32, 1)
        block["qs"] = _pack_planes(parts.codes & 15, 32, 4)
        return blocks


@register
class Q6_K(PackableFormat):
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

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        codes = _unpack_planes(block["qh"], 32, 2)
        codes <<= 4
        codes |= _unpack_planes(block["ql"], 64, 4)
        scale = block["d"].astype(np.float16)
        return Parts(codes, scale, sub_scales=np.ascontiguousarray(block["scales"]))

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["ql"] = _pack_planes(parts.codes & 15, 64, 4)
        block["qh"] = _pack_planes(parts.codes >> 4, 32, 2)
        block["scales"] = required(parts.sub_scales, "sub-scales")
        block["d"] = parts.scale
        return blocks
