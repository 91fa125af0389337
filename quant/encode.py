"""Quantisers: float32 rows to blocks.

The legacy formats round as GGML's reference does, bit for bit.  The K formats take each sub-block's
range as it is, where GGML searches for the scale with the least weighted error; the result is valid and
close, but a file for publication is better made with llama.cpp's tools.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from localllm.errors import ModelError
from localllm.quant.bits import Bytes, Floats, Halves
from localllm.quant.block_format import PackableFormat, Parts
from localllm.quant.kquants import Q4_K, Q5_K, Q6_K
from localllm.quant.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from localllm.quant.types import BLOCK_SIZES, GGMLType

# Values a chunk: temporaries stay in a core's second-level cache.
_CHUNK = 1 << 15


def quantize(values: npt.NDArray[np.floating], type: GGMLType) -> Bytes:
    """Encode rows of values.

    Args:
        values: floating point [..., n], rounded to float32 first; ``n`` a multiple of the block length.
        type: one of `ENCODERS`.

    Returns:
        uint8 [..., row_bytes].

    Raises:
        ModelError: the type has no encoder, ``n`` is no multiple of its block length, or a value is
            NaN, infinite or too large for the format.
    """
    encode = ENCODERS.get(type)
    if encode is None:
        supported = ", ".join(known.name for known in ENCODERS)
        raise ModelError(f"cannot encode tensors as {type.name}; choose one of {supported}")
    size = BLOCK_SIZES[type]
    if values.ndim == 0 or values.shape[-1] % size.length:
        raise ModelError(
            f"a row to be encoded as {type.name} has a multiple of {size.length} values; "
            f"the shape is {list(values.shape)}"
        )
    out = np.empty((*values.shape[:-1], size.row_bytes(values.shape[-1])), np.uint8)
    blocks = out.reshape(-1, size.n_bytes)
    rows = np.ascontiguousarray(values).reshape(-1, size.length)
    step = _CHUNK // size.length
    # Overflow is found in the result: every scale is checked before it is stored.
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step].astype(np.float32, copy=False)
            blocks[start : start + step] = encode(chunk)
    return out


def _check_finite(finite: npt.NDArray[np.bool_] | np.bool_, type: GGMLType) -> None:
    if not np.all(finite):
        raise ModelError(f"cannot encode as {type.name}: a value is NaN, infinite or too large for the format")


def _half(scale: Floats, type: GGMLType) -> Halves:
    """Scales [n_blocks] or [n_blocks, 1] as float16 [n_blocks].

    NaN or infinity anywhere in a block makes its scale so, and a value too large does in float16: this
    one check refuses all three.
    """
    half = scale.reshape(-1).astype(np.float16)
    _check_finite(np.isfinite(half), type)
    return half


def _reciprocal(scale: Floats) -> Floats:
    """1 / scale, and 0 where it is 0."""
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _extreme(values: Floats) -> Floats:
    """The value with the largest magnitude along the last axis, with its sign: [..., 1]."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)


def _zero_where_overflown(codes: Floats, inverse: Floats) -> Floats:
    """Clear blocks whose scale is so small that 1 / scale is infinite; it is 0 in float16 anyway."""
    codes[np.isinf(inverse[:, 0])] = 0
    return codes


def _encode_f32(values: Floats) -> Bytes:
    _check_finite(np.isfinite(values), GGMLType.F32)
    return values.astype("<f4").view(np.uint8)


def _encode_f16(values: Floats) -> Bytes:
    halves = values.astype("<f2")
    _check_finite(np.isfinite(halves), GGMLType.F16)
    return halves.view(np.uint8)


def _encode_bf16(values: Floats) -> Bytes:
    bits = values.view(np.uint32)
    # To nearest, ties to even: adds one where the lower half is above 0x8000, or at it and the rest odd.
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    _check_finite((rounded & 0x7F80 != 0x7F80) & np.isfinite(values), GGMLType.BF16)
    return rounded.view(np.uint8)


def _encode_symmetric(values: Floats, block_format: PackableFormat) -> Bytes:
    """Q4_0 and Q5_0: the value farthest from zero becomes code 0, which is one step beyond the last."""
    offset = block_format.offset
    scale = _extreme(values) / np.float32(-offset)
    inverse = _reciprocal(scale)
    codes = _zero_where_overflown(np.trunc(values * inverse + np.float32(offset + 0.5)), inverse)
    codes = np.minimum(codes, 2 * offset - 1).astype(np.uint8)
    return block_format.pack(Parts(codes, _half(scale, block_format.type)))


def _encode_with_min(values: Floats, block_format: PackableFormat, top: int) -> Bytes:
    """Q4_1 and Q5_1: the smallest value becomes code 0, the largest the highest code ``top``."""
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32(top)
    inverse = _reciprocal(scale)
    codes = _zero_where_overflown(np.trunc((values - low) * inverse + np.float32(0.5)), inverse)
    codes = np.minimum(codes, top).astype(np.uint8)
    type = block_format.type
    return block_format.pack(Parts(codes, _half(scale, type), min=_half(low, type)))


def _encode_q8_0(values: Floats) -> Bytes:
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    inverse = _reciprocal(scale)
    scaled = values * inverse
    # Half away from zero, as C's roundf; adding 0.5 would round 0.49999997 up.
    whole = np.trunc(scaled)
    codes = _zero_where_overflown(whole + np.trunc(2 * (scaled - whole)), inverse)
    return Q8_0().pack(Parts(codes.astype(np.int8), _half(scale, GGMLType.Q8_0)))


def _encode_k_with_min(values: Floats, block_format: PackableFormat, top: int) -> Bytes:
    """Q4_K and Q5_K: each sub-block spans from its smallest value, or 0, to its largest."""
    x = values.reshape(len(values), -1, block_format.sub_length)  # [n_blocks, n_sub_blocks, sub_length]
    low = np.minimum(x.min(axis=2), 0)
    step = (x.max(axis=2) - low) / top
    scale = _half(step.max(axis=1) / 63, block_format.type)
    minimum = _half(-low.min(axis=1) / 63, block_format.type)
    # What is stored has been rounded: codes are chosen for the scale and minimum that decoding will see.
    d, dmin = scale.astype(np.float32)[:, None], minimum.astype(np.float32)[:, None]
    sub_scales = np.minimum(np.rint(step * _reciprocal(d)), 63)
    sub_mins = np.minimum(np.rint(-low * _reciprocal(dmin)), 63)
    shifted = x + (dmin * sub_mins)[:, :, None]
    codes = np.clip(np.rint(shifted * _reciprocal(d * sub_scales)[:, :, None]), 0, top)
    return block_format.pack(
        Parts(
            codes=codes.astype(np.uint8).reshape(values.shape),
            scale=scale,
            min=minimum,
            sub_scales=sub_scales.astype(np.uint8),
            sub_mins=sub_mins.astype(np.uint8),
        )
    )


def _encode_q6_k(values: Floats) -> Bytes:
    """The value of a sub-block farthest from zero becomes code 0, with the sign in the sub-scale."""
    x = values.reshape(len(values), 16, 16)  # [n_blocks, n_sub_blocks, sub_length]
    step = _extreme(x)[:, :, 0] / -32
    scale = _half(np.abs(step).max(axis=1) / 127, GGMLType.Q6_K)
    d = scale.astype(np.float32)[:, None]
    sub_scales = np.clip(np.rint(step * _reciprocal(d)), -127, 127)
    codes = np.clip(np.rint(x * _reciprocal(d * sub_scales)[:, :, None]) + 32, 0, 63)
    return Q6_K().pack(
        Parts(codes.astype(np.uint8).reshape(values.shape), scale, sub_scales=sub_scales.astype(np.int8))
    )


Encoder = Callable[[Floats], Bytes]

ENCODERS: MappingProxyType[GGMLType, Encoder] = MappingProxyType(
    {
        GGMLType.F32: _encode_f32,
        GGMLType.F16: _encode_f16,
        GGMLType.BF16: _encode_bf16,
        GGMLType.Q4_0: lambda values: _encode_symmetric(values, Q4_0()),
        GGMLType.Q4_1: lambda values: _encode_with_min(values, Q4_1(), 15),
        GGMLType.Q5_0: lambda values: _encode_symmetric(values, Q5_0()),
        GGMLType.Q5_1: lambda values: _encode_with_min(values, Q5_1(), 31),
        GGMLType.Q8_0: _encode_q8_0,
        GGMLType.Q4_K: lambda values: _encode_k_with_min(values, Q4_K(), 15),
        GGMLType.Q5_K: lambda values: _encode_k_with_min(values, Q5_K(), 31),
        GGMLType.Q6_K: _encode_q6_k,
    }
)
"""What can be encoded: float32 [n_blocks, block_length] to uint8 [n_blocks, block_bytes]."""
