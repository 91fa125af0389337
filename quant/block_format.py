"""Base classes of block formats, and the registry that every format adds itself to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from localllm.quant.bits import Bytes, Floats, Halves, Ints
from localllm.quant.types import BLOCK_SIZES, GGMLType

#: Block formats by type. `BlockFormat.__init_subclass__` fills it.
REGISTRY: dict[GGMLType, BlockFormat] = {}


class BlockFormat(ABC):
    """One GGML tensor type: the layout of ``block_length`` values in ``block_bytes`` bytes."""

    type: ClassVar[GGMLType]  # id in GGUF files
    # Fields of a block, with the names of GGML's ``ggml-common.h``. Little-endian, without padding.
    layout: ClassVar[np.dtype[Any]]

    def __init_subclass__(cls) -> None:
        """Register the class unless it is an abstract base without a ``type``."""
        if "type" in vars(cls):
            REGISTRY[cls.type] = cls()

    @property
    def block_length(self) -> int:
        """Values per block."""
        return BLOCK_SIZES[self.type].length

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return BLOCK_SIZES[self.type].n_bytes

    def fields(self, blocks: Bytes) -> npt.NDArray[Any]:
        """View uint8 [n_blocks, block_bytes] as records of `layout`, [n_blocks], without a copy."""
        return blocks.view(self.layout)[:, 0]

    @abstractmethod
    def decode(self, blocks: Bytes, out: Floats) -> None:
        """Decode ``blocks``, uint8 [n_blocks, block_bytes], into ``out``, float32 [n_blocks, block_length].

        Both arrays are C-contiguous. Infinite and NaN scales cause numpy warnings. The caller
        (`localllm.quant.formats.dequantize`) suppresses them, because the values of such blocks are defined.
        """


@dataclass(frozen=True, slots=True)
class Parts:
    """Unpacked fields of blocks in an integer format.

    The value of code ``c`` in sub-block ``s`` is ``(scale * sub_scales[s]) * (c - offset)``, computed in float32 in
    this order. Formats without sub-blocks then add ``min``. Formats with sub-blocks subtract ``min * sub_mins[s]``.
    """

    # uint8 or int8 [n_blocks, block_length]. Stored codes or, in formats with a codebook, the codebook's values.
    codes: Ints
    scale: Halves  # float16 [n_blocks], GGML's ``d``
    min: Halves | None = None  # float16 [n_blocks], GGML's ``m`` or ``dmin``; None in symmetric formats
    sub_scales: Ints | None = None  # uint8 or int8 [n_blocks, n_sub_blocks]; None in formats without sub-blocks
    # uint8 [n_blocks, n_sub_blocks]; None in symmetric formats and in formats without sub-blocks
    sub_mins: Ints | None = None


class PackableFormat(BlockFormat):
    """A format whose values are small integers times a scale, so that kernels can multiply integers.

    The field ``d`` is the scale. The field ``m`` or ``dmin``, if `layout` contains one, is the minimum. Subclasses
    unpack the codes and the scales of sub-blocks. In these methods, ``block`` is an array of `layout` records,
    [n_blocks].
    """

    offset: ClassVar[int] = 0  # subtracted from every code
    sub_length: ClassVar[int]  # values per sub-scale; the whole block in formats without sub-blocks

    @abstractmethod
    def unpack_codes(self, block: npt.NDArray[Any]) -> Ints:
        """Return `Parts.codes`."""

    @abstractmethod
    def pack_codes(self, block: npt.NDArray[Any], codes: Ints) -> None:
        """Write ``codes`` into all fields that store bits of codes."""

    def unpack_scales(self, block: npt.NDArray[Any]) -> tuple[Ints | None, Ints | None]:
        """Return `Parts.sub_scales` and `Parts.sub_mins`."""
        return None, None

    def pack_scales(self, block: npt.NDArray[Any], sub_scales: Any, sub_mins: Any) -> None:
        """Write the fields that `unpack_scales` reads."""

    def unpack(self, blocks: Bytes) -> Parts:
        """Unpack uint8 [n_blocks, block_bytes]. Only unused bits are lost."""
        block = self.fields(blocks)
        minimum = None if self._min is None else block[self._min].astype(np.float16)
        return Parts(self.unpack_codes(block), block["d"].astype(np.float16), minimum, *self.unpack_scales(block))

    def pack(self, parts: Parts) -> Bytes:
        """Pack into uint8 [n_blocks, block_bytes], the inverse of `unpack`. Codes and sub-scales must be in range."""
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
        """Name of the minimum's field; None in symmetric formats."""
        return next((name for name in ("m", "dmin") if name in (self.layout.names or ())), None)

    def decode(self, blocks: Bytes, out: Floats) -> None:
        parts = self.unpack(blocks)
        n_blocks = len(blocks)
        # [n_blocks, n_sub_blocks, sub_length]; n_sub_blocks is 1 in formats without sub-blocks.
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
