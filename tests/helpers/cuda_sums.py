"""A second implementation of the CUDA kernels' arithmetic in numpy, addition by addition, so that every bit is known.

It follows kernels/cuda/dots.cuh: chunks of whole tiles, each processed in blocks of 32 columns, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.quant.block_format import PackableFormat
from localllm.quant.formats import FORMATS
from localllm.quant.iquants import IQ4_VALUES
from localllm.quant.lut import KernelType, LUTType
from localllm.quant.types import GGMLType
from tests.helpers.blocks import three_bit_codes
from tests.helpers.packed import tile_columns

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
F = np.float32


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c as float32, rounded once.

    In float64 the product is exact and the sum is rounded to odd (Boldo & Melquiond, 2008), so that the final
    rounding to float32 gives the correctly rounded result.
    """
    product, addend = a.astype(np.float64) * b, np.asarray(c, np.float64)
    with np.errstate(invalid="ignore"):  # infinite values have no error term
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    is_even = (bits & 1) == 0
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & np.isfinite(error) & is_even & (total != 0), bits + towards, bits)
    with np.errstate(over="ignore"):
        result: Floats = odd.view(np.float64).astype(F)
    return result


@dataclass(frozen=True)
class Activations:
    """Round rows to eight bits: codes [T, blocks, 32], scales d [T, blocks]."""

    codes: Ints
    d: Floats

    @property
    def values(self) -> NDArray[np.float64]:
        """[T, k]"""
        values = np.multiply(self.codes, self.d[..., None], dtype=np.float64)
        return values.reshape(len(values), -1)


def quantised(x: Floats) -> Activations:
    """Round activations with the operations of kernels/cpu/elementwise.py."""
    runs = x.reshape(len(x), -1, 32)
    largest = np.abs(runs).max(axis=2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(largest > F(1e-36), F(127) / largest, F(0))
        scaled = np.nan_to_num(np.rint(runs * inverse[..., None]))
    return Activations(scaled.astype(np.int64), largest / F(127))


@dataclass(frozen=True)
class Blocks:
    """Unpacked rows of an integer format: codes [n, blocks, 32], scales and minima [n, blocks, halves]."""

    codes: Ints
    d: Floats
    m: Floats | None


def blocks_of(rows: NDArray[np.uint8], type: KernelType) -> Blocks:
    """Unpack rows uint8 [n, row_bytes]."""
    n = len(rows)
    if isinstance(type, LUTType) or type is GGMLType.IQ4_NL:
        table = np.array(type.table if isinstance(type, LUTType) else IQ4_VALUES, np.int64)
        blocks = rows.reshape(n, -1, type.size.n_bytes if isinstance(type, LUTType) else 18)
        n_bytes = len(table).bit_length() * 4 - 4
        packed = blocks[..., -n_bytes:]
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1) if n_bytes == 16 else three_bit_codes(packed)
        return Blocks(table[codes], np.ascontiguousarray(blocks[..., :-n_bytes]).view("<f2").astype(F), None)
    format = FORMATS[type]
    assert isinstance(format, PackableFormat)
    parts = format.unpack(rows.reshape(-1, format.block_bytes))
    codes = parts.codes.astype(np.int64).reshape(n, -1, 32) - format.offset
    d = parts.scale.astype(F)[:, None]
    m = None if parts.min is None else parts.min.astype(F)[:, None]
    if parts.sub_scales is not None:
        d = d * parts.sub_scales.astype(F)
    if m is not None and parts.sub_mins is not None:
        m = -m * parts.sub_mins.astype(F)
    blocks_in_row = codes.shape[1]
    return Blocks(codes, d.reshape(n, blocks_in_row, -1), None if m is None else m.reshape(n, blocks_in_row, -1))


def chunks(n_in: int, columns: int, most: int = 16) -> list[range]:
    """Return the tiles of each chunk."""
    n = -(-n_in // columns)
    count = min(most, n)
    return [range(i * n // count, (i + 1) * n // count) for i in range(count)]


def product(rows: NDArray[np.uint8], type: KernelType, x: Floats) -> Floats:
    """Multiply x [T, k] by rows [n, k] of an integer format: float32 [T, n], bit for bit."""
    w, inputs = blocks_of(rows, type), quantised(x)
    total = np.zeros((len(x), len(rows)), F)
    in_tile = tile_columns(type) // 32
    for tiles in chunks(x.shape[1], tile_columns(type)):
        acc = np.zeros_like(total)
        for block in range(tiles.start * in_tile, min(tiles.stop * in_tile, w.codes.shape[1])):
            acc = _add_block(acc, w, inputs, block)
        total = total + acc
    return total


def _add_block(acc: Floats, w: Blocks, x: Activations, b: int) -> Floats:
    halves = w.d.shape[2]
    codes, inputs = w.codes[:, b].reshape(-1, halves, 32 // halves), x.codes[:, b].reshape(-1, halves, 32 // halves)
    dots = np.einsum("thi,nhi->tnh", inputs, codes).astype(F)
    d_x = x.d[:, b, None]
    sums = dots[..., 0] * w.d[None, :, b, 0]
    if halves == 2:
        sums = fma(dots[..., 1], np.broadcast_to(w.d[None, :, b, 1], sums.shape), sums)
    acc = fma(sums, np.broadcast_to(d_x, sums.shape), acc)
    if w.m is None:
        return acc
    minima = np.broadcast_to(w.m[None, :, b], (*sums.shape, w.m.shape[2]))
    if w.m.shape[2] == 1:
        d_sum = d_x * x.codes[:, b].sum(axis=1, dtype=np.int64).astype(F)[:, None]
        return fma(minima[..., 0], np.broadcast_to(d_sum, sums.shape), acc)
    half_sums = np.broadcast_to(inputs.sum(axis=2).astype(F)[:, None, :], minima.shape)
    lowered = fma(half_sums[..., 1], minima[..., 1], half_sums[..., 0] * minima[..., 0])
    return fma(lowered, np.broadcast_to(d_x, sums.shape), acc)


def float_product(w: Floats, x: Floats) -> Floats:
    """Multiply x [T, k] by float32 weights [n, k], column by column."""
    total = np.zeros((len(x), len(w)), F)
    for tiles in chunks(x.shape[1], 128):
        acc = np.zeros_like(total)
        for column in range(tiles.start * 128, min(tiles.stop * 128, x.shape[1])):
            shape = acc.shape
            acc = fma(
                np.broadcast_to(w[None, :, column], shape).copy(), np.broadcast_to(x[:, column, None], shape), acc
            )
        total = total + acc
    return total
