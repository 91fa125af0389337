"""Formats that no kernel reads, rewritten when they are loaded into the nearest that one does.

"Nearest" is the smallest that loses nothing measurable: the summed squared error of the weights is below a millionth
of their summed squares, in every row, where rounding numbers to float16 makes some 4e-8.

==========================  =============  ==========  =======================================================
format, bits a weight       read as        bits        what is lost (squared error / squares)
==========================  =============  ==========  =======================================================
TQ1_0 1.69, TQ2_0 2.06      Q2_K           2.63        nothing: d · 1 · code - d · 1
Q1_0 1.13, Q2_0 2.25        LUT_TERNARY    3.5         nothing
IQ1_S 1.56                  LUT_IQ1_32     3.5         scales d · (2 S + 1) / 8, rounded to float16: 4e-8
IQ1_M 1.75                  LUT_IQ1_16     4           likewise
IQ2_XXS 2.06                LUT_IQ2_32     3.5         scales d · (2 S + 1) / 8, rounded to float16: 4e-8
IQ2_XS 2.31, IQ2_S 2.56     LUT_IQ2_16     4           likewise
IQ3_XXS 3.06                LUT_IQ3_XXS    4.5         scales d · (2 S + 1) / 4, rounded to float16: 4e-8
IQ3_S 3.44                  LUT_IQ3_S      4.5         scales d · (2 S + 1), rounded to float16: 4e-8
IQ4_XS 4.25                 IQ4_NL         4.5         scales d · S, rounded to float16: 4e-8
MXFP4 4.25                  LUT_E2M1_32    4.5         nothing
NVFP4 4.5                   LUT_E2M1_16    5           nothing
==========================  =============  ==========  =======================================================

The integers of all of these are kept as they are.  (Q8_0 would take 8.5 bits, and, in the formats with a scale for
each 16 columns, lose 3e-5.)

A scale beyond float16's range, which no sane file has, cannot be kept so: `repack` then refuses, and the caller asks
for float32, which holds every format's values as they are.
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

#: The largest summed squared error of a row's scales, in units of their summed squares.
MEASURABLE = 1e-6

_ONE = np.float32(1)

#: What any format can be read as, at 32 bits a weight.
FALLBACK = GGMLType.F32


class ScaleRangeError(ModelError):
    """Scales that a kernel's format cannot hold; `FALLBACK` can."""


def repack_target(type: GGMLType) -> KernelType:
    """The type that kernels read weights of ``type`` as: itself where one reads it."""
    if type in LAYOUTS:
        return type
    if type in _REPACKERS:
        return _REPACKERS[type][0]
    raise KernelError(f"no kernel reads weights of type {type.name}; convert the model to another type, such as Q8_0")


def repack(rows: Bytes, type: GGMLType, target: KernelType) -> Bytes:
    """Rewrites rows of blocks.

    Args:
        rows: uint8 [n, row_bytes] of ``type``.
        target: what `repack_target` says, or `FALLBACK`.

    Returns:
        uint8 [n, row_bytes of the target]; ``rows`` itself where the types are the same.

    Raises:
        ScaleRangeError: the target cannot hold these scales.
    """
    if target == type:
        return rows
    if target == FALLBACK:
        return dequantize(rows, type).view(np.uint8)
    blocks = np.ascontiguousarray(rows).reshape(-1, BLOCK_SIZES[type].n_bytes)
    with np.errstate(all="ignore"):  # what overflows is found by the check of the scales
        return _REPACKERS[type][1](blocks, len(rows)).reshape(len(rows), -1)


def _halves(scales: npt.NDArray[Any], n_rows: int) -> Halves:
    """Scales of ``n_rows`` rows, rounded to float16."""
    halves = scales.astype(np.float16)
    exact = scales.astype(np.float64).reshape(n_rows, -1)
    lost = np.square(halves.reshape(n_rows, -1) - exact).sum(axis=1)
    if not np.all(lost <= MEASURABLE * np.square(exact).sum(axis=1)):  # a NaN is not
        raise ScaleRangeError("scales of the weights are beyond the range of float16, in which kernels read them")
    return halves


def _lut_blocks(scales: Floats, n_scales: int, codes: npt.NDArray[Any], n_rows: int) -> Bytes:
    """Blocks of 32 columns, as `lut` draws them, from scales in the order of the columns and words of codes."""
    blocks = np.empty(len(codes), np.dtype([("d", "<f2", (n_scales,)), ("qs", codes.dtype, codes.shape[1:])]))
    blocks["d"] = _halves(scales, n_rows).reshape(-1, n_scales)
    blocks["qs"] = codes
    return blocks.view(np.uint8)


# -- IQ1, IQ2, IQ3: eight codes at a time, in the bytes of a word --------------------------------------------------

# A mask's bits in the lowest bits of the bytes of a word: uint64 [256].
_MASK_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MASK_WORDS = _MASK_BITS.view(np.uint64)[:, 0]


@cache
def _code_rows(source: GridFormat, target: LUTType) -> npt.NDArray[Any]:
    """The codebook in codes of ``target``, masks clear: words of as many bytes as a row has values."""
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


# -- Codes of four bits that stay as they are ----------------------------------------------------------------------


def _iq4_xs(blocks: Bytes, n_rows: int) -> Bytes:
    source = IQ4_XS()
    block = source.fields(blocks)
    scales = block["d"].astype(np.float32)[:, None] * source.unpack_scales(block)[0]
    return _lut_blocks(scales, 1, np.ascontiguousarray(block["qs"]).view(np.uint64).reshape(-1, 2), n_rows)


def _mxfp4(blocks: Bytes, n_rows: int) -> Bytes:
    block = MXFP4().fields(blocks)
    codes = np.ascontiguousarray(block["qs"]).view(np.uint64)
    # A block of zeros may have any scale, and commonly has one that float16 does not reach.
    is_zero = ~(codes & np.uint64(0x7777777777777777)).any(axis=1)
    scales = np.where(is_zero, np.float32(0), HALF_E8M0[block["e"]])
    return _lut_blocks(scales, 1, codes, n_rows)


def scaled_nvfp4(rows: Bytes, factor: np.float32) -> Bytes:
    """Return rows of NVFP4 times a factor, as `LUT_E2M1_16`.  Raises ScaleRangeError as `repack` does."""
    blocks = np.ascontiguousarray(rows).reshape(-1, BLOCK_SIZES[GGMLType.NVFP4].n_bytes)
    with np.errstate(all="ignore"):
        return _nvfp4(blocks, len(rows), factor).reshape(len(rows), -1)


def _nvfp4(blocks: Bytes, n_rows: int, factor: np.float32 = _ONE) -> Bytes:
    """Codes here have 2 planes of 8; those of two such runs become 2 planes of 16."""
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
    """Blocks of 64 or 128 values with scales of their own, which do not fit into Q2_K's of 256."""
    codes = codes_of(np.array(lut.LUT_TERNARY.table))

    def repack(blocks: Bytes, n_rows: int) -> Bytes:
        parts = source.unpack(blocks)
        ours = codes[(parts.codes - np.uint8(source.offset)).view(np.uint8)].reshape(-1, lut.BLOCK_LENGTH)
        scales = np.repeat(parts.scale.astype(np.float32), source.block_length // lut.BLOCK_LENGTH)
        return _lut_blocks(scales, 1, pack_words(np.ascontiguousarray(ours).view("<u4"), 3), n_rows)

    return lut.LUT_TERNARY, repack


#: Takes blocks uint8 [n_blocks, block_bytes] and the number of rows they are; returns the target's blocks.
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
