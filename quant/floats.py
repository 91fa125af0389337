"""The plain floating-point types, as blocks of one value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.quant.bits import Bytes, Floats
from localllm.quant.block_format import BlockFormat
from localllm.quant.types import GGMLType


class F32(BlockFormat):
    """IEEE 754 binary32."""

    type = GGMLType.F32
    layout = np.dtype([("x", "<f4")])

    def decode(self, blocks: Bytes, out: Floats) -> None:
        out[:, 0] = self.fields(blocks)["x"]


class F16(F32):
    """IEEE 754 binary16."""

    type = GGMLType.F16
    layout = np.dtype([("x", "<f2")])


class BF16(BlockFormat):
    """bfloat16: the upper half of a binary32."""

    type = GGMLType.BF16
    layout = np.dtype([("x", "<u2")])

    def decode(self, blocks: Bytes, out: Floats) -> None:
        np.left_shift(self.fields(blocks)["x"], 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


def bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Return the bits of finite float32 values rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16)
