"""Packing of GGUF blocks into the interleaved tiles that CPU kernels read, without changing the size.

A matrix [n, k] is split into groups of `GROUP` = 16 rows. A kernel processes the rows of a group in parallel, one per
SIMD lane, so each load must read the same part of every row's block. A tile is therefore a *transposed* block:

    16 rows' blocks                                    a tile
    row 0: [half  ][word 0][word 1] …                  [half of row 0 … 15]  [word 0 of row 0 … 15]  [word 1 …] …
    row 1: [half  ][word 0][word 1] …       ──▶          16 × 2 bytes          16 × 4 bytes
    …

Halves are a block's 16-bit parts (the float16 scales). Words are its other bytes, four at a time, in the order of the
file. Tiles are stored in the order of the columns, group after group. The last group is padded with zero rows.

In one vector of 16 words, byte 4 r + c is byte c of row r's word: the order that the four-byte dot products of x86
and Arm require. Codes whose bits are stored in several places in the file are bit-packed first
(`localllm.quant.bit_packing`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.quant.bit_packing import BIT_PACKINGS, BitPacking
from localllm.quant.bits import Bytes
from localllm.quant.lut import LUT_TYPES, KernelType, block_size
from localllm.quant.types import GGMLType

#: Rows per tile.
GROUP = 16


class Part(NamedTuple):
    """A range of bytes in a block."""

    # offset, length: in bytes
    offset: int
    length: int
    unit: int  # bytes per transposed unit, 2 or 4
    bit_packing: BitPacking | None = None  # applied before transposing; None if the bytes stay in order

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class TileLayout:
    """Assignment of a block's bytes to halves and words."""

    type: KernelType  # the format of the blocks
    halves: tuple[int, ...]  # offsets of the 16-bit parts in a block
    words: tuple[tuple[int, int], ...]  # offset and length of each run of 32-bit parts
    bit_packing: BitPacking | None = None  # bit packing of the last run, or None

    @property
    def columns(self) -> int:
        """Columns per tile."""
        return block_size(self.type).length

    @property
    def block_bytes(self) -> int:
        return block_size(self.type).n_bytes

    @property
    def tile_bytes(self) -> int:
        return GROUP * self.block_bytes

    def packed_bytes(self, n: int, k: int) -> int:
        """Return the size of a packed matrix [n, k] in bytes."""
        return -(-n // GROUP) * (k // self.columns) * self.tile_bytes

    @property
    def parts(self) -> list[Part]:
        """Parts of a block in the order of a tile."""
        halves = [Part(offset, 2, 2) for offset in self.halves]
        words = [Part(offset, length, 4) for offset, length in self.words]
        if self.bit_packing is not None:
            words[-1] = words[-1]._replace(bit_packing=self.bit_packing)
        return halves + words

    def pack(self, rows: Bytes, out: Bytes) -> None:
        """Pack groups of rows.

        Args:
            rows: raw blocks, uint8 [n, bytes per row]. The last group is padded with zeros.
            out: receives the tiles; uint8, contiguous, ``packed_bytes`` bytes.
        """
        n, row_bytes = rows.shape
        n_blocks, groups = row_bytes // self.block_bytes, -(-n // GROUP)
        if n % GROUP:
            rows = np.concatenate([rows, np.zeros((groups * GROUP - n, row_bytes), np.uint8)])
        blocks = rows.reshape(groups, GROUP, n_blocks, self.block_bytes)
        tiles = out.reshape(groups, n_blocks, self.tile_bytes)
        offset = 0
        for piece in self.parts:
            data = blocks[..., piece.offset : piece.end]
            if piece.bit_packing is not None:
                data = piece.bit_packing.pack(data)
            offset = _transpose(data, tiles, offset, np.dtype(f"<u{piece.unit}"))

    def unpack_rows(self, packed: Bytes, k: int, rows: NDArray[np.integer]) -> Bytes:
        """Return the raw blocks of ``rows`` of a packed matrix with k columns: uint8 [len(rows), bytes per row]."""
        n_blocks = k // self.columns
        group, lane = np.divmod(np.asarray(rows, np.intp), GROUP)
        tiles = self.tile_bytes * (group[:, None] * n_blocks + np.arange(n_blocks))
        blocks = packed.take(tiles[:, :, None] + self._places[lane][:, None])
        if self.bit_packing is not None:
            offset, length = self.words[-1]
            blocks[..., offset : offset + length] = self.bit_packing.unpack(blocks[..., offset : offset + length])
        return blocks.reshape(len(rows), -1)

    @functools.cached_property
    def _places(self) -> NDArray[np.intp]:
        """Offset in a tile of each byte of each row's block, [16, block_bytes]."""
        places = np.empty((GROUP, self.block_bytes), np.intp)
        offset = 0
        for piece in self.parts:
            number, byte = np.divmod(np.arange(piece.length), piece.unit)
            in_word = np.arange(GROUP)[:, None] * piece.unit + byte
            places[:, piece.offset : piece.end] = offset + number * GROUP * piece.unit + in_word
            offset += piece.length * GROUP
        return places


def _transpose(data: Bytes, tiles: Bytes, offset: int, unit: np.dtype[np.unsignedinteger]) -> int:
    """Write data [groups, 16, blocks, bytes] as [groups, blocks, units, 16] at ``offset``. Return the next offset."""
    units = np.ascontiguousarray(data).view(unit).transpose(0, 2, 3, 1)
    end: int = offset + units.shape[2] * GROUP * unit.itemsize
    tiles[..., offset:end] = np.ascontiguousarray(units).view(np.uint8).reshape(*tiles.shape[:2], -1)
    return end


_LAYOUTS = [
    TileLayout(GGMLType.F32, (), ((0, 4),)),
    TileLayout(GGMLType.F16, (0,), ()),
    TileLayout(GGMLType.BF16, (0,), ()),
    TileLayout(GGMLType.Q4_0, (0,), ((2, 16),)),
    TileLayout(GGMLType.Q4_1, (0, 2), ((4, 16),)),
    TileLayout(GGMLType.Q5_0, (0,), ((2, 20),), BIT_PACKINGS[GGMLType.Q5_0]),
    TileLayout(GGMLType.Q5_1, (0, 2), ((4, 20),), BIT_PACKINGS[GGMLType.Q5_1]),
    TileLayout(GGMLType.Q8_0, (0,), ((2, 32),)),
    TileLayout(GGMLType.IQ4_NL, (0,), ((2, 16),)),
    TileLayout(GGMLType.Q2_K, (80, 82), ((0, 16), (16, 64))),
    TileLayout(GGMLType.Q3_K, (108,), ((96, 12), (0, 96)), BIT_PACKINGS[GGMLType.Q3_K]),
    TileLayout(GGMLType.Q4_K, (0, 2), ((4, 12), (16, 128))),
    TileLayout(GGMLType.Q5_K, (0, 2), ((4, 12), (16, 160)), BIT_PACKINGS[GGMLType.Q5_K]),
    TileLayout(GGMLType.Q6_K, (208,), ((192, 16), (0, 192)), BIT_PACKINGS[GGMLType.Q6_K]),
    *(TileLayout(t, tuple(range(0, 2 * t.n_scales, 2)), ((2 * t.n_scales, 4 * t.bits),)) for t in LUT_TYPES),
]

LAYOUTS: dict[KernelType, TileLayout] = {layout.type: layout for layout in _LAYOUTS}
"""Tile layouts of all formats that kernels read."""
