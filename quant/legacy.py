"""GGML's first formats: 32 values a block, one f16 scale, and in the ``_1`` formats an f16 minimum.

4-bit codes lie in two planes of 16, and the fifth bits of 5-bit codes in one 32-bit word::

    qs, byte j:   7 6 5 4 3 2 1 0          qh, bit j:  fifth bit of code j
                  └─────┘ └─────┘
            code j + 16   code j
"""

from __future__ import annotations

import numpy as np

from localllm.quant.bits import Bytes, Ints, bit_planes, join_bit_planes
from localllm.quant.block_format import PackableFormat, Parts, register, required
from localllm.quant.types import GGMLType

BLOCK_LENGTH = 32


def _unpack_nibbles(qs: Bytes) -> Bytes:
    """uint8 [n_blocks, 16] to the low four bits of 32 codes."""
    return bit_planes(qs, 4).reshape(len(qs), BLOCK_LENGTH)


def _pack_nibbles(codes: Ints) -> Bytes:
    """The inverse of `_unpack_nibbles`; higher bits are ignored."""
    return join_bit_planes((codes & 15).reshape(len(codes), 2, 16), 4)


def _unpack_fifth_bits(qh: Bytes) -> Bytes:
    """uint8 [n_blocks, 4] to the fifth bit of 32 codes, in its place (0 or 16)."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << np.uint8(4)


def _pack_fifth_bits(codes: Ints) -> Bytes:
    """The inverse of `_unpack_fifth_bits`; lower bits are ignored."""
    return np.packbits(codes & 16, axis=-1, bitorder="little")


@register
class Q4_0(PackableFormat):
    """value = d · (code - 8), code in 0..15::

    d   f16
    qs  u8[16]   codes
    """

    type = GGMLType.Q4_0
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
    offset = 8
    sub_length = BLOCK_LENGTH

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        return Parts(_unpack_nibbles(block["qs"]), block["d"].astype(np.float16))

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["qs"] = _pack_nibbles(parts.codes)
        return blocks


@register
class Q4_1(PackableFormat):
    """value = d · code + m, code in 0..15::

    d   f16
    m   f16
    qs  u8[16]   codes
    """

    type = GGMLType.Q4_1
    layout = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
    sub_length = BLOCK_LENGTH

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        codes = _unpack_nibbles(block["qs"])
        return Parts(codes, block["d"].astype(np.float16), min=block["m"].astype(np.float16))

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["m"] = required(parts.min, "m")
        block["qs"] = _pack_nibbles(parts.codes)
        return blocks


@register
class Q5_0(PackableFormat):
    """value = d · (code - 16), code in 0..31::

    d   f16
    qh  u8[4]    fifth bits
    qs  u8[16]   lower four bits
    """

    type = GGMLType.Q5_0
    layout = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
    offset = 16
    sub_length = BLOCK_LENGTH

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        codes = _unpack_nibbles(block["qs"]) | _unpack_fifth_bits(block["qh"])
        return Parts(codes, block["d"].astype(np.float16))

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["qh"] = _pack_fifth_bits(parts.codes)
        block["qs"] = _pack_nibbles(parts.codes)
        return blocks


@register
class Q5_1(PackableFormat):
    """value = d · code + m, code in 0..31::

    d   f16
    m   f16
    qh  u8[4]    fifth bits
    qs  u8[16]   lower four bits
    """

    type = GGMLType.Q5_1
    layout = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
    sub_length = BLOCK_LENGTH

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        codes = _unpack_nibbles(block["qs"]) | _unpack_fifth_bits(block["qh"])
        return Parts(codes, block["d"].astype(np.float16), min=block["m"].astype(np.float16))

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["m"] = required(parts.min, "m")
        block["qh"] = _pack_fifth_bits(parts.codes)
        block["qs"] = _pack_nibbles(parts.codes)
        return blocks


@register
class Q8_0(PackableFormat):
    """value = d · code, code in -128..127 (encoders use -127..127)::

    d   f16
    qs  i8[32]   codes, in order
    """

    type = GGMLType.Q8_0
    layout = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
    sub_length = BLOCK_LENGTH

    def unpack(self, blocks: Bytes) -> Parts:
        block = self.fields(blocks)
        return Parts(np.ascontiguousarray(block["qs"]), block["d"].astype(np.float16))

    def pack(self, parts: Parts) -> Bytes:
        blocks, block = self._empty(len(parts.codes))
        block["d"] = parts.scale
        block["qs"] = parts.codes
        return blocks
