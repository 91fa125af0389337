"""Packing of weights to tiles (`localllm.quant.packing`) by a kernel, at the speed of memory.

One kernel serves every format.  A layout is converted to a table of moves.  Each move transposes a part of the blocks
of
sixteen rows into a tile: 16 bytes of every row at once if words are contiguous, otherwise one word or one half.
Codes for bit packing (`localllm.quant.bit_packing`) are transposed to a buffer, and packed into the tile from there.

    16 rows, 16 bytes of each          four vectors
    row 0:  a0 b0 c0 d0                a0 a1 a2 … a15
    row 1:  a1 b1 c1 d1       ──▶      b0 b1 b2 … b15
    …                                  c0 …   d0 …
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from localllm.kernels.cpu.codes import bit_packed_word, load_bits, load_bits_raised
from localllm.kernels.cpu.compiler import addresses, kernel, variant
from localllm.kernels.cpu.instructions import *
from localllm.kernels.cpu.simd import load_i64, stack, store_i8x64
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.templates import Template, device, static_range
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, TileLayout
from localllm.quant.types import GGMLType

#: Bytes of a row per move, for the widest moves.
WIDE = 16
#: Kinds of moves: sixteen bytes of words or of halves, one word of scales or of bit planes, one half.
WORDS, HALVES, WORD, PLANES, HALF = range(5)
#: Bytes of a move in the table: its kind, the offset in the blocks that it reads, the offset that it writes, and 1 if
#: it writes to the buffer for bit packing instead of the tile.
MOVE = 32

Bytes = NDArray[np.uint8]
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


# -- Transposing sixteen rows ----------------------------------------------------------------------------------------


def _rows(b: Any, rows: Any, stride: Any, type: ir.Type) -> list[Any]:
    """Load a value from every one of sixteen rows."""
    return [load(b, b.add(rows, b.mul(stride, ir.Constant(i64, r))), type) for r in range(GROUP)]


def _columns(b: Any, rows: Any, stride: Any) -> list[Any]:
    """Return four vectors; each contains the same word of sixteen rows."""
    words = _rows(b, rows, stride, ir.VectorType(i32, 4))
    # Rows 0, 4, 8, 12 are joined, then 1, 5, 9, 13, and so on: the remaining shuffles stay within lanes of 16 bytes.
    side = [join(b, words[r::4]) for r in range(4)]
    low, high = [0, 16, 1, 17], [2, 18, 3, 19]
    pairs = [shuffle(b, _in_lanes(which), side[r], side[r + 1]) for which in (low, high) for r in (0, 2)]
    first, second = [0, 1, 16, 17], [2, 3, 18, 19]
    return [shuffle(b, _in_lanes(which), pairs[p], pairs[p + 1]) for p in (0, 2) for which in (first, second)]


def _in_lanes(words: list[int]) -> list[int]:
    """Return a shuffle of words within four lanes; ``words`` index the first lane from 0, the second from 16."""
    return [4 * lane + word for lane in range(4) for word in words]


@op(void, intp, intp, intp)
def transpose_words(b, rows, stride, tile):
    """Transpose sixteen bytes of every row: the first word of all rows, then the second, …"""
    for i, words in enumerate(_columns(b, rows, stride)):
        store(b, behind(b, tile, 64 * i), words)


@op(void, intp, intp, intp)
def transpose_halves(b, rows, stride, tile):
    """Transpose sixteen bytes of every row: the first 16 bits of all rows, then the second, …"""
    for i, words in enumerate(_columns(b, rows, stride)):
        for j, half_words in enumerate((words, b.lshr(words, constant(16, i32, GROUP)))):
            store(b, behind(b, tile, 64 * i + 32 * j), b.trunc(half_words, ir.VectorType(i16, GROUP)))


@op(void, intp, intp, intp)
def transpose_word(b, rows, stride, tile):
    """Store one word of every row."""
    for r, word in enumerate(_rows(b, rows, stride, i32)):
        store(b, behind(b, tile, 4 * r), word)


@op(void, intp, intp, intp)
def transpose_half(b, rows, stride, tile):
    """Store 16 bits of every row."""
    for r, half in enumerate(_rows(b, rows, stride, i16)):
        store(b, behind(b, tile, 2 * r), half)


@op(void, intp, intp, intp)
def transpose_planes(b, rows, stride, tile):
    """Store one word of every row; bit 4 v + c becomes bit v of byte c."""
    words = ir.Constant(ir.VectorType(i32, GROUP), ir.Undefined)
    for r, word in enumerate(_rows(b, rows, stride, i32)):
        words = b.insert_element(words, word, ir.Constant(i32, r))

    def every(n: int) -> ir.Constant:
        return constant(n, i32, GROUP)

    planes = every(0)
    for v in range(8):
        bits = b.and_(b.lshr(words, every(4 * v)), every(0xF))
        # Times 1 + 2^7 + 2^14 + 2^21: the first of four bits stays, the other bits move to the following bytes.
        spread = b.and_(b.mul(bits, every(0x204081)), every(0x01010101))
        planes = b.or_(planes, b.shl(spread, every(v)))
    store(b, tile, planes)


# -- Bit packing.  The words are words of the file, transposed: see `localllm.quant.bit_packing` -------------------


@device
def five_bit_codes(words, block):
    """Return codes of Q5_0 and Q5_1, whose fifth bits are stored in planes."""
    for v in static_range(4):
        w[v] = load_bits(words + (64 + 64 * v), 0, 15) | load_bits_raised(words, v, 1, 4)
        w[v + 4] = load_bits(words + (64 + 64 * v), 4, 15) | load_bits_raised(words, v + 4, 1, 4)
    return (*w[0:8],)


@device
def five_bit_k_codes(words, block):
    for v in static_range(8):
        low = load_bits(words + (512 + 64 * v) + 512 * (block // 2), 4 * (block % 2), 15)
        w[v] = low | load_bits_raised(words + 64 * v, block, 1, 4)
    return (*w[0:8],)


@device
def six_bit_codes(words, block):
    half, run = block // 4, block % 4
    for v in static_range(8):
        low = load_bits(words + 64 * v + 1024 * half + 512 * (run % 2), 4 * (run // 2), 15)
        w[v] = low | load_bits_raised(words + (2048 + 64 * v) + 512 * half, 2 * run, 3, 4)
    return (*w[0:8],)


@device
def three_bit_codes(words, block):
    for v in static_range(8):
        low = load_bits(words + (512 + 64 * v) + 512 * (block // 4), 2 * (block % 4), 3)
        w[v] = low | load_bits_raised(words + 64 * v, block, 1, 2)
    return (*w[0:8],)


FILE_CODES: dict[KernelType, Template] = {
    GGMLType.Q5_0: five_bit_codes, GGMLType.Q5_1: five_bit_codes, GGMLType.Q5_K: five_bit_k_codes,
    GGMLType.Q6_K: six_bit_codes, GGMLType.Q3_K: three_bit_codes,
}  # fmt: skip


# -- The kernel ------------------------------------------------------------------------------------------------------


@kernel
def pack_groups(begin, end, rows, row_bytes, n_blocks, block_bytes, moves, n_moves, tiles):
    """Pack groups of sixteen rows; a unit is a group.

    rows: ``n_blocks`` blocks of ``block_bytes`` per row.  moves: int64 [n_moves, 4], from `moves`.
    BITS: bits of bit-packed codes; 0 if codes are not bit-packed.  CODES loads the codes of 32 columns in the file's
    order, COLUMNS is the number of columns in a block, and PACKED_BITS the offset of packed codes in a tile.
    """
    aside = stack(GROUP * COLUMNS * BITS // 8)
    for group in range(begin, end):
        source = rows + group * (GROUP * row_bytes)
        tile = tiles + group * (GROUP * row_bytes)
        for _ in range(n_blocks):
            for m in range(n_moves):
                entry = moves + MOVE * m
                move = load_i64(entry)
                address = source + load_i64(entry + 8)
                target = load_i64(entry + 16)
                target += aside if load_i64(entry + 24) else tile
                if move == WORDS:
                    transpose_words(address, row_bytes, target)
                elif move == HALVES:
                    transpose_halves(address, row_bytes, target)
                elif move == WORD:
                    transpose_word(address, row_bytes, target)
                elif move == PLANES:
                    transpose_planes(address, row_bytes, target)
                else:
                    transpose_half(address, row_bytes, target)
            if BITS:
                for run in range(COLUMNS // 32):
                    w[0:8] = CODES(aside, run)
                    for word in static_range(BITS):
                        packed = bit_packed_word(*w[0:8], word, BITS)
                        store_i8x64(tile + PACKED_BITS + 64 * (BITS * run + word), packed)
            source += block_bytes
            tile += GROUP * block_bytes


def moves(layout: TileLayout) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return the bytes of each row that the moves transpose together, and the moves that create tiles of a layout.

    A block of a single value is too small for a move: `WIDE` bytes of such blocks are transposed together.
    """
    if layout.columns == 1:
        return WIDE, [(HALVES if layout.halves else WORDS, 0, 0, 0)]
    table, offset = [], 0
    for piece in layout.parts:
        aside = int(piece.bit_packing is not None)
        if aside:
            offset = 0
        if piece.unit == 2:
            table.append((HALF, piece.offset, offset, aside))
        else:
            odd = piece.length % WIDE  # for bit-packed codes, a word of fifth bits
            for at in range(0, odd, 4):
                table.append((PLANES if aside else WORD, piece.offset + at, offset + GROUP * at, aside))
            for at in range(odd, piece.length, WIDE):
                table.append((WORDS, piece.offset + at, offset + GROUP * at, aside))
        offset += piece.length * GROUP
    return layout.block_bytes, table


def _bit_packing(layout: TileLayout) -> dict[str, Any]:
    if layout.bit_packing is None:
        return {"BITS": 0, "COLUMNS": 0}
    return {
        "BITS": layout.bit_packing.bits,
        "COLUMNS": layout.bit_packing.columns,
        "CODES": FILE_CODES[layout.type],
        "PACKED_BITS": layout.tile_bytes - GROUP * layout.parts[-1].length,
    }


#: Rows of a file packed per call: enough to amortise the call, but few enough that threads finish at the same time
#: and use little memory.
PACKED_ROWS = 256


class Packer:
    """Packs rows for one layout.  Thread-safe."""

    def __init__(
        self, layout: TileLayout, target: Target, progress: Callable[[int, int], None] | None = None
    ) -> None:
        v = variant(pack_groups, target, **_bit_packing(layout))
        self._entry = _ENTRY(addresses([v], progress)[v])
        self._layout = layout
        self._step, table = moves(layout)
        self._moves = np.array(table, np.int64)

    def pack(self, rows: Bytes, out: Bytes) -> None:
        """Pack rows with the same result as `TileLayout.pack`, bit for bit; releases Python's lock while packing."""
        n_rows, row_bytes = rows.shape
        n_groups = n_rows // GROUP
        if row_bytes % self._step:
            n_groups = 0
        n_packed = n_groups * GROUP
        if n_groups:
            if not (rows.flags.c_contiguous and out.flags.c_contiguous) or out.nbytes < n_packed * row_bytes:
                raise ValueError("rows and packed output must be contiguous, and the output large enough")
            values = pack_groups.arguments(
                rows=rows.ctypes.data, row_bytes=row_bytes, n_blocks=row_bytes // self._step, block_bytes=self._step,
                moves=self._moves.ctypes.data, n_moves=len(self._moves), tiles=out.ctypes.data,
            )  # fmt: skip
            arguments = np.array(values, np.int64)  # must live until the kernel ends
            self._entry(arguments.ctypes.data, 0, n_groups)
        if n_packed < n_rows:
            self._layout.pack(rows[n_packed:], out[n_packed * row_bytes :])
