"""The base class of block formats, and the table that every format enters itself into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from localllm.quant.bits import Bytes, Floats, Halves, Ints
from localllm.quant.types import BLOCK_SIZES, GGMLType

#: Every format, by its type.
REGISTRY: dict[GGMLType, BlockFormat] = {}


class BlockFormat(ABC):
    """One tensor type of GGML: how ``block_length`` values lie in ``block_bytes`` bytes."""

    type: ClassVar[GGMLType]  # the id in GGUF files
    # the fields of a block, named as in GGML's ``ggml-common.h``, little-endian, unpadded
    layout: ClassVar[np.dtype[Any]]

    def __init_subclass__(cls) -> None:
        """Enters the format into the table that `localllm.quant.formats` offers, unless others are made of it."""
        if "type" in vars(cls):
            REGISTRY[cls.type] = cls()

    @property
    def block_length(self) -> int:
        """Values in a block."""
        return BLOCK_SIZES[self.type].length

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return BLOCK_SIZES[self.type].n_bytes

    def fields(self, blocks: Bytes) -> npt.NDArray[Any]:
        """See uint8 [n_blocks, block_bytes] as records of `layout`, [n_blocks], without a copy."""
        return blocks.view(self.layout)[:, 0]

    @abstractmethod
    def decode(self, blocks: Bytes, out: Floats) -> None:
        """Write the values of uint8 [n_blocks, block_bytes] into float32 [n_blocks, block_length].

        Both arrays are C-contiguous.  Infinite or NaN scales make numpy warn; the caller
        (`localllm.quant.formats.dequantize`) silences that, since such blocks have defined values.
        """


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks of an integer format, taken apart.

    The value of code ``c`` in sub-block ``s`` of a block is, in float32 and this order,
    ``(scale * sub_scales[s]) * (c - offset)``, then ``+ min`` in the formats without sub-blocks and
    ``- min * sub_mins[s]`` in those with them.
    """

    # uint8 or int8 [n_blocks, block_length]; as stored, but looked up in the codebook in the formats that have one
    codes: Ints
    scale: Halves  # float16 [n_blocks], GGML's ``d``
    min: Halves | None = None  # float16 [n_blocks], GGML's ``m`` or ``dmin``; None in symmetric formats
    sub_scales: Ints | None = None  # uint8 or int8 [n_blocks, n_sub_blocks]; None in formats without sub-blocks
    # uint8 [n_blocks, n_sub_blocks]; None in symmetric formats and those without sub-blocks
    sub_mins: Ints | None = None


class PackableFormat(BlockFormat):
    """A format whose values are small integers times a scale, so that kernels can multiply integers.

    The fields ``d`` and, if `layout` has one, ``m`` or ``dmin`` are the scale and the minimum; a format says where it
    has its codes and its sub-blocks' scales.  Below, ``block`` are records of `layout`, [n_blocks].
    """

    offset: ClassVar[int] = 0  # what is subtracted from every code
    sub_length: ClassVar[int]  # values that share a sub-scale; the whole block in formats without sub-blocks

    @abstractmethod
    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        """`Parts.codes`."""

    @abstractmethod
    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        """The inverse: fills all fields that codes are in."""

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints | None, Ints | None]:
        """`Parts.sub_scales` and `Parts.sub_mins`."""
        return None, None

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Any, sub_mins: Any) -> None:
        """The inverse of `unpack_scales`."""

    def unpack(self, blocks: Bytes) -> Parts:
        """Take uint8 [n_blocks, block_bytes] apart, losing nothing but unused bits."""
        block = self.fields(blocks)
        minimum = None if self._min is None else block[self._min].astype(np.float16)
        return Parts(self.unpack_codes(block), block["d"].astype(np.float16), minimum, *self.unpack_scales(block))

    def pack(self, parts: Parts) -> Bytes:
        """The inverse of `unpack`: uint8 [n_blocks, block_bytes].  Codes and sub-scales must be in range."""
        blocks = np.empty((len(parts.codes), self.block_bytes), np.uint8)
        block = self.fields(blocks)
        block["d"] = parts.scale
        if self._min is not None:
            assert parts.min is not None
            block[self._min] = parts.min
        self.pack_codes(block, parts.codes)
        self.pack_scales(block, parts.sub_scales, parts.sub_mins)
        return blocks

    @property
    def _min(self) -> str | None:
        """The name of the minimum's field."""
        return next((name for name in ("m", "dmin") if name in (self.layout.names or ())), None)

    def decode(self, blocks: Bytes, out: Floats) -> None:
        parts = self.unpack(blocks)
        n_blocks = len(blocks)
        # [n_blocks, n_sub_blocks, sub_length]; n_sub_blocks is 1 where there are none.
        shape = (n_blocks, self.block_length // self.sub_length, self.sub_length)
        values = out.reshape(shape)
        np.subtract(parts.codes.reshape(shape), self.offset, out=values, dtype=np.float32)
        scale = parts.scale.astype(np.float32)[:, None]
        if parts.sub_scales is not None:
            scale = scale * parts.sub_scales
        values *= scale[:, :, None]
        if parts.min is None:
            return
        minimum = parts.min.astype(np.float32)[:, None]
        if parts.sub_mins is None:
            values += minimum[:, :, None]
        else:
            values -= (minimum * parts.sub_mins)[:, :, None]
