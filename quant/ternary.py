"""Formats of ternary and binary models such as BitNet: codes -1, 0 and 1, or -1 and 1, times an f16 scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.quant.bits import Bytes, Ints, bit_planes, join_bit_planes
from localllm.quant.block_format import PackableFormat
from localllm.quant.kquants import PlaneFormat
from localllm.quant.types import GGMLType

BLOCK_LENGTH = 256


def _unpack_trits(data: Bytes, count: int) -> Bytes:
    """Return the first ``count`` base-3 digits of every byte: uint8 [n_blocks, k] to [n_blocks, count * k].

    A byte is a base-3 fraction of 256, rounded up, with the most significant digit first. Multiplying by 3^p modulo
    256 drops the first p digits. The integer part of 3/256 of the product is then the next digit.
    """
    trits = np.empty((len(data), count, data.shape[1]), np.uint8)
    for digit in range(count):
        fraction = data * np.uint8(3**digit)
        trits[:, digit] = fraction.astype(np.uint16) * 3 >> 8
    return trits.reshape(len(data), -1)


def _pack_trits(codes: Ints, count: int) -> Bytes:
    """Pack base-3 digits, the inverse of `_unpack_trits`: [n_blocks, count * k] to uint8 [n_blocks, k]."""
    number = np.zeros((len(codes), codes.shape[1] // count), np.uint16)
    for trits in np.split(codes, count, axis=1):
        number = number * np.uint16(3) + trits
    number *= 3 ** (5 - count)
    return ((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)


class TQ1_0(PackableFormat):
    """value = d · (code - 1), code in 0..2::

    qs  u8[48]   five codes a byte, in base 3: 5 planes of 32, then 5 of 16
    qh  u8[4]    four codes a byte, in base 3: 4 planes of 4
    d   f16
    """

    type = GGMLType.TQ1_0
    layout = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
    offset = 1
    sub_length = BLOCK_LENGTH

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        qs = block["qs"]
        runs = [_unpack_trits(qs[:, :32], 5), _unpack_trits(qs[:, 32:], 5), _unpack_trits(block["qh"], 4)]
        return np.concatenate(runs, axis=1)

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        block["qs"][:, :32] = _pack_trits(codes[:, :160], 5)
        block["qs"][:, 32:] = _pack_trits(codes[:, 160:240], 5)
        block["qh"] = _pack_trits(codes[:, 240:], 4)


class TQ2_0(PlaneFormat):
    """value = d · (code - 1), code in 0..2 (a stored 3 decodes to 2 · d)::

    qs  u8[64]   codes, 2 bits, 2 runs of 4 planes of 32
    d   f16
    """

    type = GGMLType.TQ2_0
    layout = np.dtype([("qs", "u1", 64), ("d", "<f2")])
    offset = 1
    sub_length = BLOCK_LENGTH
    planes = (("qs", 32, 2),)


class Q1_0(PackableFormat):
    """value = d · (code - 1), code 0 or 2::

    d   f16
    qs  u8[16]   a bit a value, lowest first: 1 is code 2
    """

    type = GGMLType.Q1_0
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
    offset = 1
    sub_length = 128

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        return np.unpackbits(block["qs"], axis=-1, bitorder="little") << np.uint8(1)

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        block["qs"] = np.packbits(codes >> 1, axis=-1, bitorder="little")


class Q2_0(PackableFormat):
    """value = d · (code - 1), code in 0..3::

    d   f16
    qs  u8[16]   codes, 2 bits, four neighbours a byte, lowest first
    """

    type = GGMLType.Q2_0
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
    offset = 1
    sub_length = 64

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        return bit_planes(block["qs"][..., None], 2).reshape(len(block), self.sub_length)

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        block["qs"] = join_bit_planes(codes.reshape(len(codes), -1, 4, 1), 2)[..., 0]
