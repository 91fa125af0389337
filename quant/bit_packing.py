"""Bit packing of codes of three, five and six bits, designed so that few instructions unpack them.

In files, the lower and the upper bits of a code are stored in different places. A kernel would have to shift, mask
and join the parts of every code. Bit packing stores the codes of 32 columns in one 32-bit word per bit of a code,
four columns to a word, one in each byte. The first codes are the lowest bits of these bytes. The remaining codes are
split over the unused bits above:

    six bits    word 0 … 5   the codes of columns 4 v … 4 v + 3, v = 0 … 5, in bits 0 … 5 of the four bytes
                             v = 6 in bits 6, 7 of words 0, 1, 2 (two bits of the code in each), v = 7 in 3, 4, 5

Eight vectors of codes then cost two shifts and masks each on average instead of four. `BIT_RUNS` lists the positions
for all widths. Bit packing only reorders bits, without padding.

Source of the order in files: the block structures of ggml (ggml-common.h), see `localllm.quant.kquants`.
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

#: Columns packed together, and columns per word.
COLUMNS, IN_A_WORD = 32, 4

#: Positions of the codes of columns 4 v … 4 v + 3 for v = 0 … 7, by bits per code. A run is (word, first bit in its
#: bytes, number of bits); the runs of a code start with its lowest bits.
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
    """Pack words that hold the codes of four columns, one in each byte: [..., 8] to [..., bits]."""
    packed = np.zeros((*codes.shape[:-1], bits), "<u4")
    for v, word, mask, down, up in _moves(bits):
        packed[..., word] |= (codes[..., v] >> down & mask) << up
    return packed


def unpack_words(packed: Words, bits: int) -> Words:
    """Unpack words, the inverse of `pack_words`: [..., bits] to [..., 8]."""
    codes = np.zeros((*packed.shape[:-1], COLUMNS // IN_A_WORD), "<u4")
    for v, word, mask, down, up in _moves(bits):
        codes[..., v] |= (packed[..., word] >> up & mask) << down
    return codes


def _moves(bits: int) -> Iterator[tuple[int, int, np.uint32, np.uint32, np.uint32]]:
    """Yield v, the word, the mask of a code's bits in every byte, and the shifts in code and word, for each run."""
    for v, runs in enumerate(BIT_RUNS[bits]):
        down = 0
        for word, first, n in runs:
            yield v, word, np.uint32(0x01010101 * ((1 << n) - 1)), np.uint32(down), np.uint32(first)
            down += n


@dataclass(frozen=True)
class BitPacking:
    """The bit packing of a format's codes."""

    bits: int  # bits per code
    columns: int  # columns per block in the file
    # Maps (column, b) to the position of bit b of the column's code in the file, within the bytes that hold codes.
    # Position 8 i + j is bit j of byte i.
    position: Callable[[int, int], int]

    @functools.cached_property
    def order(self) -> NDArray[np.intp]:
        """Position in the file of each bit-packed bit."""
        order = np.empty(self.columns * self.bits, np.intp)
        for column in range(self.columns):
            block, offset = divmod(column, COLUMNS)
            v, byte = divmod(offset, IN_A_WORD)
            bit = 0
            for word, first, n in BIT_RUNS[self.bits][v]:
                start = 8 * (IN_A_WORD * (self.bits * block + word) + byte) + first
                order[start : start + n] = [self.position(column, bit + i) for i in range(n)]
                bit += n
        return order

    @functools.cached_property
    def _inverse(self) -> NDArray[np.intp]:
        return np.argsort(self.order)

    def pack(self, codes: Bytes) -> Bytes:
        """Bit-pack the bytes that hold a block's codes in a file: uint8 [..., n] to uint8 [..., n]."""
        return _reordered(codes, self.order)

    def unpack(self, packed: Bytes) -> Bytes:
        """Restore the file's order, the inverse of `pack`."""
        return _reordered(packed, self._inverse)


def _reordered(data: Bytes, order: NDArray[np.intp]) -> Bytes:
    bits = np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")
    return np.packbits(bits[..., order], axis=-1, bitorder="little")


def _five_bits(column: int, bit: int) -> int:
    """Q5_0, Q5_1: four bytes of fifth bits, then 16 bytes of nibbles, the low nibbles first."""
    if bit == 4:
        return column
    return 8 * (4 + column % 16) + 4 * (column // 16) + bit


def _five_bits_k(column: int, bit: int) -> int:
    """Q5_K: 32 bytes of fifth bits, one bit for each 32 columns, then four runs of 32 bytes of nibbles."""
    run, i = divmod(column, 32)
    if bit == 4:
        return 8 * i + run
    return 8 * (32 + 32 * (run // 2) + i) + 4 * (run % 2) + bit


def _six_bits(column: int, bit: int) -> int:
    """Q6_K: 64 bytes of nibbles per 128 columns, then 32 bytes of upper bit pairs per 128 columns."""
    half, offset = divmod(column, 128)
    run, i = divmod(offset, 32)
    if bit >= 4:
        return 8 * (128 + 32 * half + i) + 2 * run + bit - 4
    return 8 * (64 * half + 32 * (run % 2) + i) + 4 * (run // 2) + bit


def _three_bits(column: int, bit: int) -> int:
    """Q3_K: 32 bytes of third bits, one bit for each 32 columns, then 32 bytes of bit pairs per 128 columns."""
    half, offset = divmod(column, 128)
    run, i = divmod(offset, 32)
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
"""Formats whose codes are bit-packed."""
