"""Random blocks of every format, with realistic scales, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf.quants
import numpy as np
from numpy.typing import NDArray

from localllm.quant.formats import FORMATS
from localllm.quant.lut import KernelType, LUTType, block_size
from localllm.quant.repack import repack_target
from localllm.quant.types import GGMLType

T = GGMLType

#: Byte offsets of the float16 fields in a block, independent of the code under test.
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
    T.Q1_0: (0,),
    T.Q2_0: (0,),
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

#: Formats with a kernel each.  All look-up table formats count as one, because only their tables differ.
KERNEL_FORMATS = [t for t in FORMATS if repack_target(t) is t] + [T.IQ2_XS]


def has_own_kernel(type: GGMLType) -> bool:
    """Return whether the format shares a kernel with `KERNEL_FORMATS`.  Other kernels take a second to compile and
    run only in CI."""
    return repack_target(type) in map(repack_target, KERNEL_FORMATS)


#: Scale that makes all values of an integer format integers.
UNITS: dict[GGMLType, float] = {
    **{t: 1.0 for t in F16_FIELDS if t is not T.F16},
    T.IQ2_XXS: 8.0,
    T.IQ2_XS: 8.0,
    T.IQ2_S: 8.0,
    T.IQ3_XXS: 4.0,
    T.IQ1_S: 8.0,
    T.IQ1_M: 8.0,
    T.MXFP4: 2.0,
    T.NVFP4: 2.0,
}


def random_rows(
    type: KernelType, n: int, k: int, *, scales: Sequence[float] = (), seed: int = 0
) -> NDArray[np.uint8]:
    """Return rows uint8 [n, row_bytes] of k columns, with random codes, and scales near 0.02 or from ``scales``.

    ``scales`` for MXFP4 and NVFP4 must be powers of two.
    """
    rng = np.random.default_rng(seed)
    size = block_size(type)
    blocks = rng.integers(0, 256, (n * k // size.length, size.n_bytes), np.uint8)
    set_scales(blocks, type, scales, rng)
    return blocks.reshape(n, -1)


def set_scales(
    blocks: NDArray[np.uint8], type: KernelType, scales: Sequence[float], rng: np.random.Generator
) -> None:
    """Set every scale in blocks [n_blocks, block_bytes], or every value of a float format; see `random_rows`."""
    count = len(blocks)

    def chosen(*shape: int) -> NDArray[Any]:
        return rng.choice(scales, shape) if scales else rng.normal(0, 0.02, shape)

    if isinstance(type, LUTType):
        for i in range(type.n_scales):
            _write(blocks, 2 * i, chosen(count).astype("<f2"))
    elif type is T.F32:
        _write(blocks, 0, chosen(count).astype("<f4"))
    elif type is T.BF16:
        _write(blocks, 0, chosen(count).astype("<f4").view("<u2")[1::2])
    elif type is T.MXFP4:
        exponents = np.log2(scales) if scales else np.arange(-7.0, 3)
        blocks[:, 0] = 127 + rng.choice(exponents, count).astype(int)
    elif type is T.NVFP4:
        codes = [8 * (7 + int(np.log2(s))) for s in scales] or range(30, 90)
        blocks[:, :4] = rng.choice(codes, (count, 4))
    elif type is T.IQ1_M:  # the scale's bits are the upper four bits of the last four words
        bits = chosen(count).astype(np.float16).view(np.uint16)
        for digit in range(4):
            byte = blocks[:, 48 + 2 * digit + 1]
            byte[...] = byte & 15 | (bits >> 4 * digit & 15) << 4
    else:
        for offset in F16_FIELDS[type]:
            _write(blocks, offset, chosen(count).astype("<f2"))


def _write(blocks: NDArray[np.uint8], offset: int, values: NDArray[Any]) -> None:
    """Write one value into each block at byte ``offset``."""
    raw = np.ascontiguousarray(values).reshape(-1, 1).view(np.uint8)
    blocks[:, offset : offset + raw.shape[1]] = raw


def three_bit_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack codes [..., 32] from bytes [..., 12], whose low and middle three bits are the first 24 codes."""
    rest, top = packed[..., :8] >> 6, packed[..., 8:] >> 6
    last = [rest[..., :4] | (top & 1) << 2, rest[..., 4:] | top >> 1 << 2]
    return np.concatenate([packed & 7, packed >> 3 & 7, *last], axis=-1)


def gguf_values(rows: NDArray[np.uint8], type: GGMLType) -> NDArray[np.float32]:
    """Decode rows [..., row_bytes] with the gguf package, or by GGML's definition if the package has no decoder.

    Raises:
        NotImplementedError: the type is unknown to both.
    """
    if type not in (T.Q1_0, T.Q2_0):
        values: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type))
        return values
    blocks = rows.reshape(-1, 18)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    bits, per_byte = (1, 8) if type is T.Q1_0 else (2, 4)
    codes = np.stack([blocks[:, 2:] >> bits * i & (1 << bits) - 1 for i in range(per_byte)], axis=-1)
    codes = codes.reshape(len(blocks), -1).astype(np.float32)
    levels = 2 * codes - 1 if type is T.Q1_0 else codes - 1
    return (levels * scales).reshape(*rows.shape[:-1], -1)


def values_of(rows: NDArray[np.uint8], type: KernelType) -> NDArray[np.float64]:
    """Decode rows with the gguf package, or by definition for the kernels' private formats."""
    with np.errstate(all="ignore"):
        if not isinstance(type, LUTType):
            return np.asarray(gguf_values(rows, type), np.float64)
        blocks = rows.reshape(-1, type.size.n_bytes)
        n_scales = 32 // type.scale_length
        scales = np.ascontiguousarray(blocks[:, : 2 * n_scales]).view("<f2").astype(np.float64)
        packed = blocks[:, 2 * n_scales :]
        codes = np.concatenate([packed & 15, packed >> 4], axis=1)  # two planes of 16
        if len(type.table) == 8:
            codes = three_bit_codes(packed)
        values = np.array(type.table, np.float64)[codes].reshape(len(blocks), n_scales, -1) * scales[:, :, None]
        return np.asarray(values.reshape(len(rows), -1))
