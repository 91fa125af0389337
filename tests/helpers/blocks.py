"""Random blocks of every format with scales as real files have them, and what the kernels' own formats mean."""

from __future__ import annotations

from typing import Any

import gguf.quants
import numpy as np
from numpy.typing import NDArray

from localllm.quant.lut import KernelType, LUTType, block_size
from localllm.quant.types import GGMLType

T = GGMLType

#: Where the float16 fields of a block stand, in bytes; written down apart from the code under test.
F16_FIELDS: dict[GGMLType, tuple[int, ...]] = {
    T.F16: (0,),
    T.Q4_0: (0,),
    T.Q4_1: (0, 2),
    T.Q5_0: (0,),
    T.Q5_1: (0, 2),
    T.Q8_0: (0,),
    T.Q2_K: (80, 82),
    T.Q3_K: (108,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
    T.TQ1_0: (52,),
    T.TQ2_0: (64,),
    T.IQ2_XXS: (0,),
    T.IQ2_XS: (0,),
    T.IQ2_S: (0,),
    T.IQ3_XXS: (0,),
    T.IQ3_S: (0,),
    T.IQ1_S: (0,),
    T.IQ4_NL: (0,),
    T.IQ4_XS: (0,),
}


def random_rows(type: KernelType, n: int, k: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Rows uint8 [n, row_bytes] of k columns: any codes, every value finite and most of them near 1."""
    rng = np.random.default_rng(seed)
    size = block_size(type)
    blocks = rng.integers(0, 256, (n * k // size.length, size.n_bytes), np.uint8)
    count = len(blocks)
    if isinstance(type, LUTType):
        for i in range(type.n_scales):
            write_halves(blocks, 2 * i, rng.normal(0, 0.02, count))
    elif type is T.F32:
        blocks = rng.standard_normal(count).astype("<f4").view(np.uint8)
    elif type is T.BF16:
        blocks = np.ascontiguousarray(rng.standard_normal(count).astype("<f4").view("<u2")[1::2]).view(np.uint8)
        blocks = np.resize(blocks, count * 2)
    elif type is T.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, count)
    elif type is T.NVFP4:
        blocks[:, :4] = rng.integers(40, 70, (count, 4))
    elif type is T.IQ1_M:  # the scale's digits are the upper four bits of the last four words
        bits = rng.uniform(0.01, 0.02, count).astype(np.float16).view(np.uint16)
        for digit in range(4):
            byte = blocks[:, 48 + 2 * digit + 1]
            byte[...] = byte & 15 | (bits >> 4 * digit & 15) << 4
    elif type is T.F16:
        write_halves(blocks, 0, rng.standard_normal(count))
    else:
        for offset in F16_FIELDS[type]:
            write_halves(blocks, offset, rng.normal(0, 0.02, count))
    return blocks.reshape(n, -1)


def write_halves(blocks: NDArray[np.uint8], offset: int, values: Any) -> None:
    """Puts float16 values at ``offset`` of blocks [n_blocks, block_bytes]."""
    blocks[:, offset : offset + 2] = np.asarray(values, "<f2").reshape(-1, 1).view(np.uint8)


def values_of(rows: NDArray[np.uint8], type: KernelType) -> NDArray[np.float64]:
    """The values of rows, by the gguf package, or for the kernels' own formats by their definition."""
    with np.errstate(all="ignore"):
        if not isinstance(type, LUTType):
            return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type)).astype(np.float64)
        blocks = rows.reshape(-1, type.size.n_bytes)
        n_scales = 32 // type.scale_length
        scales = np.ascontiguousarray(blocks[:, : 2 * n_scales]).view("<f2").astype(np.float64)
        nibbles = blocks[:, 2 * n_scales :]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)  # two planes of 16
        values = np.array(type.table, np.float64)[codes].reshape(len(blocks), n_scales, -1) * scales[:, :, None]
        return values.reshape(len(rows), -1)
