"""Array types of the block formats, and GGML's two ways to pack codes that are narrower than a byte."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
# Small integers. The docstring names the dtype, because numpy's stubs lose it in mixed arithmetic.
Ints: TypeAlias = npt.NDArray[Any]
Halves: TypeAlias = npt.NDArray[np.float16]
Floats: TypeAlias = npt.NDArray[np.float32]


def bit_planes(data: Bytes, width: int) -> Bytes:
    """Split every byte into ``8 // width`` codes that are ``k`` values apart.

    This is GGML's usual order: the lowest bits of k bytes are the first k codes, the next bits the
    next k codes.

    Args:
        data: uint8 [..., k].
        width: bits per code; 1, 2 or 4.

    Returns:
        uint8 [..., 8 // width, k].
    """
    planes = np.empty((*data.shape[:-1], 8 // width, data.shape[-1]), np.uint8)
    for plane in range(8 // width):
        np.right_shift(data, plane * width, out=planes[..., plane, :])
    planes &= (1 << width) - 1
    return planes


def join_bit_planes(planes: Ints, width: int) -> Bytes:
    """Join the planes that `bit_planes` returns: uint8 [..., 8 // width, k] to uint8 [..., k]."""
    data: Bytes = planes[..., 0, :].copy()
    for plane in range(1, 8 // width):
        data |= planes[..., plane, :] << np.uint8(plane * width)
    return data


def bit_fields(words: Ints, width: int, count: int) -> Ints:
    """Return the ``count`` lowest ``width``-bit fields per word, lowest first, [..., k] to [..., k, count]."""
    shifts = np.arange(0, width * count, width, dtype=words.dtype)
    fields: Ints = words[..., None] >> shifts
    fields &= (1 << width) - 1
    return fields


def codes_of(table: Ints) -> Bytes:
    """Return the first code of each int8 value in ``table``, indexed by the value's byte: uint8 [256]."""
    codes = np.zeros(256, np.uint8)
    for code in reversed(range(len(table))):
        codes[int(table[code]) & 255] = code
    return codes
