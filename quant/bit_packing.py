"""Codes of three, five and six bits, packed so that few instructions unpack them.

In files the lower bits of codes lie in one place and their upper bits in others, and a kernel would have to shift,
mask and join each of them.  Bit-packed, the codes of 32 columns fill as many words of 32 bits as they have bits, four
columns to a word, one in each byte.  The first codes are just the lowest bits of these bytes.  The others are cut
into the bits that are left above them:

    six bits    word 0 … 5   the codes of columns 4 v … 4 v + 3, v = 0 … 5, in bits 0 … 5 of the four bytes
                             v = 6 in bits 6, 7 of words 0, 1, 2 (two bits of the code in each), v = 7 in 3, 4, 5

so that eight vectors of codes cost two shifts and masks each on average in place of four.  `BIT_RUNS` has it for all.
No bit is lost or made: bit packing only changes their order.

Source of the files' order: the block structures of ggml (ggml-common.h), as in `localllm.quant.kquants`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.quant.bits import Bytes
from localllm.quant.types import GGMLType

Words = NDArray[np.uint32]

#: Columns whose codes are packed together, and how many of them lie in a word.
COLUMNS, IN_A_WORD = 32, 4

#: For codes of so many bits: where those of columns 4 v … 4 v + 3 are, for v = 0 … 7, as runs (word, first bit in
#: its bytes, number of bits), the lowest bits of the code first.
BIT_RUNS: dict[int, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    3: (
        *(((word, 0, 3),) for word in range(3)),
        *(((word, 3, 3),) for word in range(3)),
        ((0, 6, 2), (2, 6, 1)),
        ((1, 6, 2), (2, 7, 1)),
    ),
    5: (
        *(((word, 0, 5),) for word in range(5)),
        ((0, 5, 3), (1, 6, 2)),
        ((2, 5, 3), (3, 6, 2)),
        ((4, 5, 3), (1, 5, 1), (3, 5, 1)),
    ),
    6: (
        *(((word, 0, 6),) for word in range(6)),
        ((0, 6, 2), (1, 6, 2), (2, 6, 2)),
        ((3, 6, 2), (4, 6, 2), (5, 6, 2)),
    ),
}


def pack_words(codes: Words, bits: int) -> Words:
    """Words with the codes of four columns each, one in a byte, [..., 8], bit-packed: [..., bits]."""
    packed = np.zeros((*codes.shape[:-1], bits), "<u4")
    for v, word, mask, down, up in _moves(bits):
        packed[..., word] |= (codes[..., v] >> down & mask) << up
    return packed


def unpack_words(packed: Words, bits: int) -> Words:
    """The inverse of `pack_words`."""
    codes = np.zeros((*packed.shape[:-1], COLUMNS // IN_A_WORD), "<u4")
    for v, word, mask, down, up in _moves(bits):
        codes[..., v] |= (packed[..., word] >> up & mask) << down
    return codes


def _moves(bits: int) -> Iterator[tuple[int, int, np.uint32, np.uint32, np.uint32]]:
    """For each run: v, the word, a mask of its bits in every byte, and their places in the code and in the word."""
    for v, runs in enumerate(BIT_RUNS[bits]):
        down = 0
        for word, first, n in runs:
            yield v, word, np.uint32(0x01010101 * ((1 << n) - 1)), np.uint32(down), np.uint32(first)
            down += n


@dataclass(frozen=True)
class BitPacking:
    """How a format's codes are bit-packed."""

    bits: int  # of a code
    columns: int  # in a block of the file
    # in the bytes of the block that hold codes, the bit that is bit b of column c's code, (c, b) to it. Bit 8 i + j
    # is bit j of byte i.
    place: Callable[[int, int], int]

    @functools.cached_property
    def order(self) -> NDArray[np.intp]:
        """For each bit of the bit-packed codes, the bit of the file's that goes there."""
        order = np.empty(self.columns * self.bits, np.intp)
        for column in range(self.columns):
            block, rest = divmod(column, COLUMNS)
            v, byte = divmod(rest, IN_A_WORD)
            bit = 0
            for word, first, n in BIT_RUNS[self.bits][v]:
                start = 8 * (IN_A_WORD * (self.bits * block + word) + byte) + first
                order[start : start + n] = [self.place(column, bit + i) for i in range(n)]
                bit += n
        return order

    @functools.cached_property
    def _inverse(self) -> NDArray[np.intp]:
        return np.argsort(self.order)

    def pack(self, codes: Bytes) -> Bytes:
        """The bytes that hold a block's codes in a file, uint8 [..., n], bit-packed: as many."""
        return _reordered(codes, self.order)

    def unpack(self, packed: Bytes) -> Bytes:
        """The inverse of `pack`."""
        return _reordered(packed, self._inverse)


def _reordered(data: Bytes, order: NDArray[np.intp]) -> Bytes:
    bits = np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")
    return np.packbits(bits[..., order], axis=-1, bitorder="little")


def _five_bits(column: int, bit: int) -> int:
    """Q5_0, Q5_1: four bytes of fifth bits, sixteen of nibbles, the low ones first."""
    if bit == 4:
        return column
    return 8 * (4 + column % 16) + 4 * (column // 16) + bit


def _five_bits_k(column: int, bit: int) -> int:
    """Q5_K: 32 bytes of fifth bits, one bit for each 32 columns, and four times 32 of nibbles."""
    run, i = divmod(column, 32)
    if bit == 4:
        return 8 * i + run
    return 8 * (32 + 32 * (run // 2) + i) + 4 * (run % 2) + bit


def _six_bits(column: int, bit: int) -> int:
    """Q6_K: for each 128 columns 64 bytes of nibbles; then for each 32 bytes of pairs of upper bits."""
    half, rest = divmod(column, 128)
    run, i = divmod(rest, 32)
    if bit >= 4:
        return 8 * (128 + 32 * half + i) + 2 * run + bit - 4
    return 8 * (64 * half + 32 * (run % 2) + i) + 4 * (run // 2) + bit


def _three_bits(column: int, bit: int) -> int:
    """Q3_K: 32 bytes of third bits, one bit for each 32 columns; then for each 128 columns 32 of pairs of bits."""
    half, rest = divmod(column, 128)
    run, i = divmod(rest, 32)
    if bit == 2:
        return 8 * i + 4 * half + run
    return 8 * (32 + 32 * half + i) + 2 * run + bit


BIT_PACKINGS: dict[GGMLType, BitPacking] = {
    GGMLType.Q5_0: BitPacking(5, 32, _five_bits),
    GGMLType.Q5_1: BitPacking(5, 32, _five_bits),
    GGMLType.Q3_K: BitPacking(3, 256, _three_bits),
    GGMLType.Q5_K: BitPacking(5, 256, _five_bits_k),
    GGMLType.Q6_K: BitPacking(6, 256, _six_bits),
}
"""The formats whose codes are bit-packed."""
