"""Block formats by type, and decoding of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from localllm.errors import ModelError, UsageError

# Imported to register their formats.
from localllm.quant import floats, fp4, iquants, kquants, legacy, ternary  # noqa: F401
from localllm.quant.bits import Bytes, Floats
from localllm.quant.block_format import REGISTRY, BlockFormat
from localllm.quant.types import GGMLType

FORMATS: Mapping[GGMLType, BlockFormat] = MappingProxyType(REGISTRY)
"""Decodable formats by type."""

# Values per chunk. The temporary arrays of a decoder then fit into a core's second-level cache.
_CHUNK = 1 << 15


def dequantize(data: Bytes, type: GGMLType) -> Floats:
    """Decode rows of blocks, bit for bit like GGML's reference implementation.

    Args:
        data: uint8 [..., row_bytes], any strides.
        type: format of ``data``.

    Returns:
        float32 [..., n], a new array.

    Raises:
        ModelError: the type has no decoder, or ``row_bytes`` is not a multiple of its block size.
        UsageError: ``data`` is not a uint8 array of at least one dimension.
    """
    block_format = FORMATS.get(type)
    if block_format is None:
        supported = ", ".join(sorted(supported_type.name for supported_type in FORMATS))
        raise ModelError(
            f"cannot decode tensors of type {type.name}; convert the model to a supported type: {supported}"
        )
    if data.dtype != np.uint8 or data.ndim == 0:
        raise UsageError(f"blocks must be a uint8 array [..., row_bytes], not {data.dtype} {list(data.shape)}")
    n_bytes = data.shape[-1]
    if n_bytes % block_format.block_bytes:
        raise ModelError(
            f"a row of {n_bytes:,} bytes is not a whole number of {type.name} blocks "
            f"({block_format.block_bytes} bytes each): the tensor is cut or its shape is wrong"
        )
    n = n_bytes // block_format.block_bytes * block_format.block_length
    out = np.empty((*data.shape[:-1], n), np.float32)
    blocks = np.ascontiguousarray(data).reshape(-1, block_format.block_bytes)
    values = out.reshape(-1, block_format.block_length)
    step = _CHUNK // block_format.block_length
    # A scale may be infinite or NaN, and a product may overflow. IEEE 754 defines the values.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            block_format.decode(blocks[start : start + step], values[start : start + step])
    return out
