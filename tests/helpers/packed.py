"""A second implementation of the CUDA layout of packed weights, in numpy, from codes and scales.

It follows the drawings in kernels/cuda/codes.cuh and kernels/cuda/formats.cuh; it shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.quant.block_format import PackableFormat
from localllm.quant.formats import FORMATS
from localllm.quant.lut import KernelType, LUTType, block_size
from localllm.quant.types import GGMLType
from tests.helpers.blocks import three_bit_codes

T = GGMLType
Bytes = NDArray[np.uint8]

FLOATS = (T.F32, T.F16, T.BF16)
#: Bits per code.
BITS: dict[KernelType, int] = {T.Q4_0: 4, T.Q4_1: 4, T.Q5_0: 5, T.Q5_1: 5, T.Q8_0: 8, T.IQ4_NL: 4}
K_BITS: dict[KernelType, int] = {T.Q2_K: 2, T.Q3_K: 3, T.Q4_K: 4, T.Q5_K: 5, T.Q6_K: 6}
#: Byte offsets of the scales in a K block.
K_SCALES: dict[KernelType, list[int]] = {
    T.Q2_K: [*range(16), *range(80, 84)],
    T.Q3_K: list(range(96, 110)),
    T.Q4_K: list(range(16)),
    T.Q5_K: list(range(16)),
    T.Q6_K: list(range(192, 210)),
}


@dataclass(frozen=True)
class Rows:
    """Unpacked rows of an integer format.

    Attributes:
        codes: uint8 [n, k], unchanged from the file.
        scales: uint8 [n, tiles, scale bytes of a tile].
    """

    codes: Bytes
    scales: Bytes


def bits_of(type: KernelType) -> int:
    """Return the number of bits per code."""
    return type.bits if isinstance(type, LUTType) else K_BITS.get(type) or BITS[type]


def tile_columns(type: KernelType) -> int:
    return 256 if type in K_BITS else 128


def tile_bytes(type: KernelType) -> int:
    """Return the bytes of 32 rows of a tile; the number of bits per weight equals the file's."""
    size = block_size(type)
    return 32 * tile_columns(type) // size.length * size.n_bytes


def _codes(blocks: Bytes, type: KernelType) -> Bytes:
    """Unpack uint8 [n_blocks, block_bytes] to uint8 [n_blocks, length]."""
    known = FORMATS.get(type) if isinstance(type, GGMLType) else None
    if isinstance(known, PackableFormat) and type is not T.IQ4_NL:
        return known.unpack(blocks).codes.view(np.uint8)
    if bits_of(type) == 3:
        return three_bit_codes(blocks[:, -12:])
    nibbles = blocks[:, -16:]
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=1)


def _rows(rows: Bytes, type: KernelType) -> Rows:
    """Unpack rows whose columns fill whole tiles."""
    n, size = len(rows), block_size(type)
    blocks = rows.reshape(-1, size.n_bytes)
    codes = _codes(blocks, type).reshape(n, -1)
    places = K_SCALES.get(type) or list(range(size.n_bytes - 4 * bits_of(type)))
    scales = blocks[:, np.array(places)]
    return Rows(codes, np.ascontiguousarray(scales).reshape(n, codes.shape[1] // tile_columns(type), -1))


def _run(codes: Bytes, bits: int) -> Bytes:
    """Pack codes [..., 128] into units: uint8 [..., bits, 16]."""
    blocks = codes.reshape(*codes.shape[:-1], 4, 2, 16)  # block, half, column
    shape = codes.shape[:-1]
    if bits == 8:
        return blocks.reshape(*shape, 8, 16)
    units: list[Bytes] = []
    if bits >= 4:
        units = [((blocks[..., b, 0, :] & 15) | (blocks[..., b, 1, :] & 15) << 4).astype(np.uint8) for b in range(4)]
    words: list[NDArray[np.uint32]] = []
    fours = blocks.reshape(*shape, 4, 2, 4, 4).astype(np.uint32)  # block, half, t, c
    for b in range(4):
        pairs = fours[..., b, :, :, :] >> (4 if bits == 6 else 0) & 3
        places = 8 * np.arange(4) + 2 * np.arange(4)[:, None]  # [t, c]
        if bits in (2, 3, 6):
            words += [(pairs[..., half, :, :] << places).sum((-1, -2), dtype=np.uint32) for half in (0, 1)]
        if bits in (3, 5):
            singles = fours[..., b, :, :, :].reshape(*shape, 8, 4) >> (bits - 1) & 1
            places = 8 * np.arange(4) + np.arange(8)[:, None]
            words.append((singles << places).sum((-1, -2), dtype=np.uint32))
    tail = np.stack(words, axis=-1).astype("<u4").view(np.uint8).reshape(*shape, -1, 16) if words else None
    parts = [np.stack(units, axis=-2)] if units else []
    return np.concatenate([*parts, *([] if tail is None else [tail])], axis=-2)


def _units(n_bytes: int) -> list[int]:
    """Split a row's scales into the largest possible units."""
    sizes = []
    while n_bytes:
        sizes.append(next(size for size in (16, 8, 4, 2) if size <= n_bytes))
        n_bytes -= sizes[-1]
    return sizes


def _tiles(rows: Rows, type: KernelType) -> Bytes:
    """Pack rows that fill whole groups: uint8 [groups, tiles, tile bytes]."""
    groups, columns = len(rows.codes) // 32, tile_columns(type)
    codes = rows.codes.reshape(groups, 32, -1, columns // 128, 128)
    runs = _run(codes, bits_of(type)).transpose(0, 2, 3, 4, 1, 5)  # group, tile, run, unit, row, byte
    tiles = [runs.reshape(groups, runs.shape[1], -1)]
    scales, place = rows.scales.reshape(groups, 32, runs.shape[1], -1), 0
    for size in _units(scales.shape[-1]):
        tiles.append(scales[..., place : place + size].transpose(0, 2, 1, 3).reshape(groups, runs.shape[1], -1))
        place += size
    return np.concatenate(tiles, axis=2)


def _float_tiles(values: NDArray[np.generic]) -> Bytes:
    """Pack 16- or 32-bit values [whole groups, whole tiles]: uint8 [groups, tiles, tile bytes]."""
    groups = len(values) // 32
    if values.itemsize == 4:
        units = values.reshape(groups, 32, -1, 32, 4).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(units).view(np.uint8).reshape(groups, units.shape[1], -1)
    # group, half of its rows, rows g and g + 8; tile, step of 16 columns, columns and columns + 8, t, two columns
    parts = values.reshape(groups, 2, 2, 8, -1, 8, 2, 4, 2)
    lanes = parts.transpose(0, 4, 5, 1, 3, 7, 6, 2, 8)  # lane 4 g + t: words (columns, columns + 8) x (g, g + 8)
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(groups, parts.shape[4], -1)


def pack(rows: Bytes, type: KernelType, n_in: int) -> Bytes:
    """Pack rows uint8 [n, row_bytes] of ``n_in`` columns: uint8 [groups, tiles, tile bytes]."""
    n, size, columns = len(rows), block_size(type), tile_columns(type)
    k = -(-n_in // columns) * columns
    padded = np.zeros((-(-n // 32) * 32, k // size.length * size.n_bytes), np.uint8)
    padded[:n, : rows.shape[1]] = rows
    if type in FLOATS:
        return _float_tiles(padded.view("<u4" if type is T.F32 else "<u2"))
    tiles = _rows(padded, type)
    # Padding codes are zero bytes, even if code zero means another value.
    tiles.codes[n:], tiles.codes[:, n_in:] = 0, 0
    return _tiles(tiles, type)
