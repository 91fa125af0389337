"""Conversion of formats without a kernel to the nearest format with one, when weights are loaded.

The nearest format is the smallest without a measurable loss: in every row, the sum of squared errors is below a
millionth of the sum of squares. Rounding scales to float16 causes about 4e-8.

==========================  =============  ==========  =======================================================
format, bits per weight     read as        bits        loss (squared error / squares)
==========================  =============  ==========  =======================================================
TQ1_0 1.69, TQ2_0 2.06      Q2_K           2.63        0: d · 1 · code - d · 1
Q1_0 1.13, Q2_0 2.25        LUT_TERNARY    3.5         0
IQ1_S 1.56                  LUT_IQ1_32     3.5         scales d · (2 S + 1) / 8, rounded to float16: 4e-8
IQ1_M 1.75                  LUT_IQ1_16     4           scales d · (2 S + 1) / 8, rounded to float16: 4e-8
IQ2_XXS 2.06                LUT_IQ2_32     3.5         scales d · (2 S + 1) / 8, rounded to float16: 4e-8
IQ2_XS 2.31, IQ2_S 2.56     LUT_IQ2_16     4           scales d · (2 S + 1) / 8, rounded to float16: 4e-8
IQ3_XXS 3.06                LUT_IQ3_XXS    4.5         scales d · (2 S + 1) / 4, rounded to float16: 4e-8
IQ3_S 3.44                  LUT_IQ3_S      4.5         scales d · (2 S + 1), rounded to float16: 4e-8
IQ4_XS 4.25                 IQ4_NL         4.5         scales d · S, rounded to float16: 4e-8
MXFP4 4.25                  LUT_E2M1_32    4.5         0
NVFP4 4.5                   LUT_E2M1_16    5           0
==========================  =============  ==========  =======================================================

All integers stay exact. (Q8_0 would need 8.5 bits and, for formats with a scale per 16 columns, lose 3e-5.)

A scale outside float16's range, which valid models do not contain, cannot be converted. `repack` then raises
`ScaleRangeError`, and the caller uses float32 instead, which represents the values of every format exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.errors import KernelError, ModelError
from localllm.quant import lut
from localllm.quant.bit_packing import pack_words
from localllm.quant.bits import Bytes, Floats, Halves, codes_of
from localllm.quant.block_format import PackableFormat, Parts
from localllm.quant.formats import dequantize
from localllm.quant.fp4 import HALF_E8M0, HALF_UE4M3, MXFP4, NVFP4
from localllm.quant.iq_grids import grid
from localllm.quant.iquants import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_XS, GridFormat
from localllm.quant.kquants import Q2_K
from localllm.quant.lut import KernelType, LUTType
from localllm.quant.packing import LAYOUTS
from localllm.quant.ternary import Q1_0, Q2_0, TQ1_0, TQ2_0
from localllm.quant.types import BLOCK_SIZES, GGMLType

#: Largest sum of squared errors of a row's scales, relative to their sum of squares.
MEASURABLE = 1e-6

_ONE = np.float32(1)

#: Target type for any format, at 32 bits per weight.
FALLBACK = GGMLType.F32


class ScaleRangeError(ModelError):
    """Scales do not fit into the target format. `FALLBACK` can store them."""


def repack_target(type: GGMLType) -> KernelType:
    """Return the kernels' type for weights of ``type``: ``type`` itself if a kernel reads it.

    Raises:
        KernelError: no kernel reads the type, and it cannot be converted.
    """
    if type in LAYOUTS:
        return type
    if type in _REPACKERS:
        return _REPACKERS[type][0]
    raise KernelError(f"no kernel reads weights of type {type.name}; convert the model to another type, such as Q8_0")


def repack(rows: Bytes, type: GGMLType, target: KernelType) -> Bytes:
    """Convert rows of blocks.

    Args:
        rows: uint8 [n, row_bytes] of ``type``.
        target: the result of `repack_target`, or `FALLBACK`.

    Returns:
        uint8 [n, row_bytes of the target]; ``rows`` itself if the types are equal.

    Raises:
        ScaleRangeError: the target cannot store these scales.
    """
    if target == type:
        return rows
    if target == FALLBACK:
        return dequantize(rows, type).view(np.uint8)
    blocks = np.ascontiguousarray(rows).reshape(-1, BLOCK_SIZES[type].n_bytes)
    with np.errstate(all="ignore"):  # `_halves` detects overflow
        return _REPACKERS[type][1](blocks, len(rows)).reshape(len(rows), -1)


def _halves(scales: npt.NDArray[Any], n_rows: int) -> Halves:
    """Round the scales of ``n_rows`` rows to float16. Raises ScaleRangeError."""
    halves = scales.astype(np.float16)
    exact = scales.astype(np.float64).reshape(n_rows, -1)
    lost = np.square(halves.reshape(n_rows, -1) - exact).sum(axis=1)
    if not np.all(lost <= MEASURABLE * np.square(exact).sum(axis=1)):  # also true for NaN
        raise ScaleRangeError("scales of the weights are outside the range of float16, which kernels require")
    return halves


def _lut_blocks(scales: Floats, n_scales: int, codes: npt.NDArray[Any], n_rows: int) -> Bytes:
    """Return `lut` blocks of 32 columns from scales in the order of the columns and packed words of codes."""
    blocks = np.empty(len(codes), np.dtype([("d", "<f2", (n_scales,)), ("qs", codes.dtype, codes.shape[1:])]))
    blocks["d"] = _halves(scales, n_rows).reshape(-1, n_scales)
    blocks["qs"] = codes
    return blocks.view(np.uint8)


# -- IQ1, IQ2, IQ3: eight codes at a time, one per byte of a word --------------------------------------------------

# Words whose byte i is bit i of a mask: uint64 [256].
_MASK_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MASK_WORDS = _MASK_BITS.view(np.uint64)[:, 0]


@cache
def _code_rows(source: GridFormat, target: LUTType) -> npt.NDArray[Any]:
    """Return the codebook as codes of ``target``, masks clear: one word per row, one byte per value."""
    values = grid(source.type).copy()
    rows = values.reshape(1, -1, 8)
    source.apply_masks(rows, np.zeros(rows.shape[:2], np.uint8))
    unsigned = np.array(target.table[: len(target.table) // 2])
    codes = (unsigned == values[..., None] / source.unit).argmax(axis=-1).astype(np.uint8)
    words: npt.NDArray[Any] = codes.view(f"=u{codes.shape[1]}")[:, 0]
    return words


def _from_grid(source: GridFormat, target: LUTType) -> tuple[KernelType, Repacker]:
    def repack(blocks: Bytes, n_rows: int) -> Bytes:
        parts = source.unpack(blocks)
        signs = _MASK_WORDS[parts.masks] << np.uint64(target.bits - 1)
        eights = _code_rows(source, target)[parts.index].view(np.uint64) ^ signs
        if target.bits == 3:
            codes = pack_words(eights.view("<u4").reshape(-1, 8), 3)
        else:  # columns 0 … 7 and 16 … 23 share bytes, and so do 8 … 15 and 24 … 31
            halves = eights.reshape(-1, 2, 2)
            codes = np.bitwise_or(halves[:, 0], halves[:, 1] << 4, dtype=np.uint64)
        return _lut_blocks(parts.scales * np.float32(source.unit), target.n_scales, codes, n_rows)

    return target, repack


# -- Four-bit codes that need no conversion ------------------------------------------------------------------------


def _iq4_xs(blocks: Bytes, n_rows: int) -> Bytes:
    source = IQ4_XS()
    block = source.fields(blocks)
    scales = block["d"].astype(np.float32)[:, None] * source.unpack_scales(block)[0]
    return _lut_blocks(scales, 1, np.ascontiguousarray(block["qs"]).view(np.uint64).reshape(-1, 2), n_rows)


def _mxfp4(blocks: Bytes, n_rows: int) -> Bytes:
    block = MXFP4().fields(blocks)
    codes = np.ascontiguousarray(block["qs"]).view(np.uint64)
    # The scale of a block of zeros is arbitrary, and often outside float16's range.
    is_zero = ~(codes & np.uint64(0x7777777777777777)).any(axis=1)
    scales = np.where(is_zero, np.float32(0), HALF_E8M0[block["e"]])
    return _lut_blocks(scales, 1, codes, n_rows)


def scaled_nvfp4(rows: Bytes, factor: np.float32) -> Bytes:
    """Return rows of NVFP4 times a factor, in the format `LUT_E2M1_16`. Raises ScaleRangeError."""
    blocks = np.ascontiguousarray(rows).reshape(-1, BLOCK_SIZES[GGMLType.NVFP4].n_bytes)
    with np.errstate(all="ignore"):
        return _nvfp4(blocks, len(rows), factor).reshape(len(rows), -1)


def _nvfp4(blocks: Bytes, n_rows: int, factor: np.float32 = _ONE) -> Bytes:
    """Convert blocks, times a factor. Two runs of 2 planes of 8 codes become one run of 2 planes of 16."""
    block = NVFP4().fields(blocks)
    runs = np.ascontiguousarray(block["qs"]).view(np.uint64).reshape(-1, 2)
    first, second = runs[:, 0], runs[:, 1]
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    codes = np.stack([first & low | (second & low) << 4, first >> 4 & low | second & ~low], axis=1)
    return _lut_blocks(HALF_UE4M3[block["d"]] * factor, 2, codes, n_rows)


# -- Ternary -------------------------------------------------------------------------------------------------------


def _from_ternary(source: PackableFormat) -> tuple[KernelType, Repacker]:
    def repack(blocks: Bytes, n_rows: int) -> Bytes:
        parts = source.unpack(blocks)
        d = _halves(parts.scale, n_rows)
        ones = np.ones((len(blocks), 16), np.uint8)
        return Q2_K().pack(Parts(parts.codes, scale=d, min=d, sub_scales=ones, sub_mins=ones))

    return GGMLType.Q2_K, repack


def _from_short_ternary(source: PackableFormat) -> tuple[KernelType, Repacker]:
    """Convert blocks of 64 or 128 values. Their scales do not fit into Q2_K's blocks of 256."""
    codes = codes_of(np.array(lut.LUT_TERNARY.table))

    def repack(blocks: Bytes, n_rows: int) -> Bytes:
        parts = source.unpack(blocks)
        ours = codes[(parts.codes - np.uint8(source.offset)).view(np.uint8)].reshape(-1, lut.BLOCK_LENGTH)
        scales = np.repeat(parts.scale.astype(np.float32), source.block_length // lut.BLOCK_LENGTH)
        return _lut_blocks(scales, 1, pack_words(np.ascontiguousarray(ours).view("<u4"), 3), n_rows)

    return lut.LUT_TERNARY, repack


#: Converts blocks, uint8 [n_blocks, block_bytes], of a number of rows to the target's blocks.
Repacker = Callable[[Bytes, int], Bytes]

_REPACKERS: dict[GGMLType, tuple[KernelType, Repacker]] = {
    GGMLType.IQ1_S: _from_grid(IQ1_S(), lut.LUT_IQ1_32),
    GGMLType.IQ1_M: _from_grid(IQ1_M(), lut.LUT_IQ1_16),
    GGMLType.IQ2_XXS: _from_grid(IQ2_XXS(), lut.LUT_IQ2_32),
    GGMLType.IQ2_XS: _from_grid(IQ2_XS(), lut.LUT_IQ2_16),
    GGMLType.IQ2_S: _from_grid(IQ2_S(), lut.LUT_IQ2_16),
    GGMLType.IQ3_XXS: _from_grid(IQ3_XXS(), lut.LUT_IQ3_XXS),
    GGMLType.IQ3_S: _from_grid(IQ3_S(), lut.LUT_IQ3_S),
    GGMLType.IQ4_XS: (GGMLType.IQ4_NL, _iq4_xs),
    GGMLType.MXFP4: (lut.LUT_E2M1_32, _mxfp4),
    GGMLType.NVFP4: (lut.LUT_E2M1_16, _nvfp4),
    GGMLType.Q1_0: _from_short_ternary(Q1_0()),
    GGMLType.Q2_0: _from_short_ternary(Q2_0()),
    GGMLType.TQ1_0: _from_ternary(TQ1_0()),
    GGMLType.TQ2_0: _from_ternary(TQ2_0()),
}
