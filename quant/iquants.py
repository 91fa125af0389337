"""IQ formats: values from a codebook, 256 per block (32 in IQ4_NL).

In IQ1, IQ2 and IQ3 an index selects a row of 4 or 8 values from a codebook (`grid`). Signs are stored separately, and
a scale covers 16 or 32 values. In IQ4 every code selects one of 16 unevenly spaced integers.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from localllm.quant.bits import Bytes, Floats, Halves, Ints, bit_fields, bit_planes, codes_of, join_bit_planes
from localllm.quant.block_format import BlockFormat, PackableFormat
from localllm.quant.iq_grids import MASKS_OF_7, SIGNS, grid
from localllm.quant.types import GGMLType

BLOCK_LENGTH = 256

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_IQ4_CODES = codes_of(IQ4_VALUES)


@dataclass(frozen=True, slots=True)
class GridParts:
    """Unpacked fields of blocks in a format with a codebook."""

    index: Ints  # unsigned [n_blocks, rows], codebook rows in order
    # uint8 [n_blocks, 32], one bit for each of 8 values, lowest first. A set bit makes the value negative or, in IQ1,
    # shifts it down.
    masks: Bytes
    scales: Floats  # float32 [n_blocks, n_sub_blocks]


class GridFormat(BlockFormat):
    """A format whose values are a scale times signed rows of a codebook."""

    unit: ClassVar[float] = 1  # unscaled values are integers times this

    @abstractmethod
    def unpack(self, blocks: Bytes) -> GridParts:
        """Unpack uint8 [n_blocks, block_bytes] without loss."""

    def pack(self, index: Ints, masks: Bytes, d: Halves, sub_scales: Ints) -> Bytes:
        """Return blocks of the fields of `GridParts`, but with scales as stored.

        Args:
            d: float16 [n_blocks].
            sub_scales: integers [n_blocks, n_sub_blocks].
        """
        blocks = np.empty((len(index), self.block_bytes), np.uint8)
        block = self.fields(blocks)
        if "d" in (self.layout.names or ()):
            block["d"] = d
        self._fill(block, index.astype(np.uint32), masks, sub_scales.astype(np.uint32), d.view(np.uint16))
        return blocks

    @abstractmethod
    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        """Write all fields except ``d``. Indices and sub-scales are uint32. ``d`` holds the scales' bits, uint16."""

    def decode(self, blocks: Bytes, out: Floats) -> None:
        parts = self.unpack(blocks)
        codebook = grid(self.type)
        rows = out.reshape(*parts.index.shape, codebook.shape[1])
        # Indices are always in range. "clip" avoids a temporary buffer in numpy.
        np.take(codebook, parts.index, axis=0, out=rows, mode="clip")
        self.apply_masks(out.reshape(len(blocks), 32, 8), parts.masks)
        values = out.reshape(*parts.scales.shape, -1)
        values *= parts.scales[:, :, None]

    def apply_masks(self, values: Floats, masks: Bytes) -> None:
        """Apply the bits of ``masks`` to values [n_blocks, 32, 8]."""
        values *= SIGNS[masks]


def _half_steps(d: Halves, sub_scales: Ints, unit: float) -> Floats:
    """Return d · (S + 1/2) · unit: float16 [n_blocks] and unsigned [n_blocks, k] to float32 [n_blocks, k]."""
    steps = sub_scales.astype(np.float32) + np.float32(0.5)
    return d.astype(np.float32)[:, None] * steps * np.float32(unit)


def _odd_steps(d: Halves, sub_scales: Ints) -> Floats:
    """Return d · (2 S + 1): float16 [n_blocks] and unsigned [n_blocks, k] to float32 [n_blocks, k]."""
    return d.astype(np.float32)[:, None] * (2 * sub_scales + 1).astype(np.float32)


def _join_fields(fields: Ints, width: int, count: int) -> Ints:
    """Pack fields, the inverse of `bit_fields`: [n_blocks, k * count] to uint32 [n_blocks, k]."""
    shifts = np.arange(0, width * count, width, dtype=np.uint32)
    words: Ints = (fields.reshape(len(fields), -1, count).astype(np.uint32) << shifts).sum(axis=2, dtype=np.uint32)
    return words


def _nibbles(data: Bytes) -> Ints:
    """Split uint8 [n_blocks, k] into [n_blocks, 2 * k], the low half of each byte first."""
    return bit_fields(data, 4, 2).reshape(len(data), -1)


class IQ2_XXS(GridFormat):
    """value = d · (S + 1/2) / 4 · sign · grid, S of 32 values in 0..15::

    d       f16
    groups  8 times, 32 values each:
        grid   u8[4]   indices of 8 values each
        signs  u32     SSSS, then four times 7 sign bits (`MASKS_OF_7`), lowest first
    """

    type = GGMLType.IQ2_XXS
    layout = np.dtype([("d", "<f2"), ("groups", [("grid", "u1", 4), ("signs", "<u4")], 8)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        word = block["groups"]["signs"]
        index = block["groups"]["grid"].reshape(len(blocks), 32)
        masks = MASKS_OF_7[bit_fields(word, 7, 4).reshape(len(blocks), 32)]
        return GridParts(index, masks, _half_steps(block["d"], word >> 28, 0.25))

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["groups"]["grid"] = index.reshape(-1, 8, 4)
        block["groups"]["signs"] = _join_fields(masks & 127, 7, 4) | sub_scales << 28


class IQ2_XS(GridFormat):
    """value = d · (S + 1/2) / 4 · sign · grid, S of 16 values in 0..15::

    d       f16
    qs      u16[32]   7 sign bits (`MASKS_OF_7`), then a 9-bit index of 8 values
    scales  u8[8]     S of the second, then of the first 16 of 32 values: SSSSssss
    """

    type = GGMLType.IQ2_XS
    layout = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        qs = block["qs"]
        return GridParts(qs & 511, MASKS_OF_7[qs >> 9], _half_steps(block["d"], _nibbles(block["scales"]), 0.25))

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["qs"] = index | (masks & 127).astype(np.uint32) << 9
        block["scales"] = _join_fields(sub_scales, 4, 2)


class IQ2_S(GridFormat):
    """value = d · (S + 1/2) / 4 · sign · grid, S of 16 values in 0..15::

    d       f16
    qs      u8[32]   lower eight bits of the indices, of 8 values each
    signs   u8[32]   sign bits
    qh      u8[8]    upper two bits of four indices, lowest first
    scales  u8[8]    S of the second, then of the first 16 of 32 values: SSSSssss
    """

    type = GGMLType.IQ2_S
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        high = bit_fields(block["qh"], 2, 4).reshape(len(blocks), 32).astype(np.uint16)
        scales = _half_steps(block["d"], _nibbles(block["scales"]), 0.25)
        return GridParts(block["qs"] | high << 8, block["signs"], scales)

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["qs"] = index & 255
        block["signs"] = masks
        block["qh"] = _join_fields(index >> 8, 2, 4)
        block["scales"] = _join_fields(sub_scales, 4, 2)


class IQ3_XXS(GridFormat):
    """value = d · (S + 1/2) / 2 · sign · grid, S of 32 values in 0..15::

    d      f16
    qs     u8[64]   indices of 4 values each
    signs  u32[8]   SSSS, then four times 7 sign bits (`MASKS_OF_7`), lowest first
    """

    type = GGMLType.IQ3_XXS
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        word = block["signs"]
        masks = MASKS_OF_7[bit_fields(word, 7, 4).reshape(len(blocks), 32)]
        return GridParts(block["qs"], masks, _half_steps(block["d"], word >> 28, 0.5))

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["qs"] = index
        block["signs"] = _join_fields(masks & 127, 7, 4) | sub_scales << 28


class IQ3_S(GridFormat):
    """value = d · (2 S + 1) · sign · grid, S of 32 values in 0..15::

    d       f16
    qs      u8[64]   lower eight bits of the indices, of 4 values each
    qh      u8[8]    ninth bits of eight indices, lowest first
    signs   u8[32]   sign bits
    scales  u8[4]    S of the second, then of the first 32 of 64 values: SSSSssss
    """

    type = GGMLType.IQ3_S
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        ninth = np.unpackbits(block["qh"], axis=1, bitorder="little").astype(np.uint16)
        scales = _odd_steps(block["d"], _nibbles(block["scales"]))
        return GridParts(block["qs"] | ninth << 8, block["signs"], scales)

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["qs"] = index & 255
        block["qh"] = _join_fields(index >> 8, 1, 8)
        block["signs"] = masks
        block["scales"] = _join_fields(sub_scales, 4, 2)


class ShiftedGridFormat(GridFormat):
    """A format whose masks shift values by 1/8 instead of changing signs: down for a set bit, up for a clear bit."""

    unit = 1 / 8

    def apply_masks(self, values: Floats, masks: Bytes) -> None:
        values += SIGNS[masks] * np.float32(self.unit)


class IQ1_S(ShiftedGridFormat):
    """value = d · (2 S + 1) · (grid ± 1/8), S and the sign of 32 values::

    d   f16
    qs  u8[32]   lower eight bits of the indices, of 8 values each
    qh  u16[8]   sign of the 1/8, SSS, then the upper three bits of four indices, lowest first
    """

    type = GGMLType.IQ1_S
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        qh = block["qh"]
        index = block["qs"] | bit_fields(qh, 3, 4).reshape(len(blocks), 32) << 8
        masks = np.repeat(np.where(qh & 0x8000, np.uint8(255), np.uint8(0)), 4, axis=1)
        return GridParts(index, masks, _odd_steps(block["d"], qh >> 12 & 7))

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["qs"] = index & 255
        block["qh"] = _join_fields(index >> 8, 3, 4) | sub_scales << 12 | (masks[:, ::4] & 1).astype(np.uint32) << 15


class IQ1_M(ShiftedGridFormat):
    """value = d · (2 S + 1) · (grid ± 1/8), S of 16 values, the sign of 8::

    qs      u8[32]   lower eight bits of the indices, of 8 values each
    qh      u8[16]   for two indices, lowest first: sign of the 1/8, upper three bits
    scales  u16[4]   DDDD, then SSS four times, lowest first

    ``d`` is the f16 whose four hexadecimal digits are the DDDD, the first one lowest.
    """

    type = GGMLType.IQ1_M
    layout = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])

    def unpack(self, blocks: Bytes) -> GridParts:
        block = self.fields(blocks)
        scales = block["scales"]
        digits = scales >> 12
        d = digits[:, 0] | digits[:, 1] << 4 | digits[:, 2] << 8 | digits[:, 3] << 12
        qh = _nibbles(block["qh"])
        index = block["qs"] | (qh & 7).astype(np.uint16) << 8
        masks = np.where(qh & 8, np.uint8(255), np.uint8(0))
        sub_scales = bit_fields(scales, 3, 4).reshape(len(blocks), 16)
        return GridParts(index, masks, _odd_steps(d.view(np.float16), sub_scales))

    def _fill(self, block: npt.NDArray[Any], index: Ints, masks: Bytes, sub_scales: Ints, d: Ints) -> None:
        block["qs"] = index & 255
        block["qh"] = _join_fields(index >> 8 | (masks & 8).astype(np.uint32), 4, 2)
        block["scales"] = _join_fields(sub_scales, 3, 4) | bit_fields(d[:, None], 4, 4)[:, 0].astype(np.uint32) << 12


class IQ4_NL(PackableFormat):
    """value = d · table[code], code in 0..15::

    d   f16
    qs  u8[16]   codes, 4 bits, 2 planes of 16
    """

    type = GGMLType.IQ4_NL
    layout = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
    sub_length = 32

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        return IQ4_VALUES[bit_planes(block["qs"], 4).reshape(len(block), 32)]

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        block["qs"] = join_bit_planes(_IQ4_CODES[codes.view(np.uint8)].reshape(-1, 2, 16), 4)


class IQ4_XS(PackableFormat):
    """value = d · S · table[code], code in 0..15, S of 32 values in -32..31::

    d         f16
    scales_h  u16       upper two bits of the eight S + 32, lowest first
    scales_l  u8[4]     lower four bits of two S + 32, lowest first
    qs        u8[128]   codes, 4 bits, 8 runs of 2 planes of 16
    """

    type = GGMLType.IQ4_XS
    layout = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])
    sub_length = 32

    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        return IQ4_VALUES[bit_planes(block["qs"].reshape(-1, 8, 16), 4).reshape(len(block), BLOCK_LENGTH)]

    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        planes = _IQ4_CODES[codes.view(np.uint8)].reshape(-1, 8, 2, 16)
        block["qs"] = join_bit_planes(planes, 4).reshape(-1, 128)

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints, None]:
        high = bit_fields(block["scales_h"], 2, 8).astype(np.uint8)
        return (_nibbles(block["scales_l"]) | high << 4).view(np.int8) - np.int8(32), None

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Ints, sub_mins: None) -> None:
        scales = (sub_scales + 32).astype(np.uint8)
        block["scales_h"] = _join_fields(scales >> 4, 2, 8)[:, 0]
        block["scales_l"] = _join_fields(scales & 15, 4, 2)
