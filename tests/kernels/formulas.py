"""Formulas of operations in float64, which share no code with the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.graph import Rope

Array = NDArray[Any]


def heads(x: Array, dim: int) -> Array:
    """Reshape rows [T, n * dim] to heads [T, n, dim]."""
    return x.reshape(len(x), -1, dim)


def normed(x: Array, weight: Array | None, eps: float) -> Array:
    """RMS norm over the last axis."""
    wide = x.astype(np.float64)
    normalised: Array = wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps)
    return normalised if weight is None else normalised * weight


def rotated(x: Array, positions: Array, rope: Rope | None) -> Array:
    """Rotate heads [T, n, head_dim] as complex numbers.

    Args:
        positions: [T], or [T, frequencies] for a rope whose frequencies follow several axes.
    """
    out = x.astype(np.float64)
    if rope is None:
        return out
    n, first = len(rope.frequencies), rope.first
    steps = (slice(first, first + 2 * n, 2), slice(first + 1, first + 2 * n, 2))
    a, b = steps if rope.interleaved else (slice(first, first + n), slice(first + n, first + 2 * n))
    angles = (positions.reshape(len(x), -1) + rope.position_offset)[:, None] * rope.frequencies.astype(np.float64)
    turned = (out[..., a] + 1j * out[..., b]) * rope.magnitude * np.exp(1j * angles)
    out[..., a], out[..., b] = turned.real, turned.imag
    return out


def attended(
    q: Array,
    keys: Array,
    values: Array,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    chunk: int | None = None,
    causal: bool = True,
    begins: Array | None = None,
    ends: Array | None = None,
    prompts: Array | None = None,
    slopes: Array | None = None,
    biases: Array | None = None,
) -> Array:
    """Attention of the last T of L positions.

    Args:
        q: [T, H, key_dim].
        keys: [L, G, key_dim].
        values: [L, G, value_dim].
        prompts: [T], number of the first positions that each token sees, without later ones.

    Returns:
        [T, H * value_dim].
    """
    n_tokens, n_heads = q.shape[:2]
    keys, values = (np.repeat(x, n_heads // x.shape[1], axis=1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    of_keys = np.arange(len(keys))
    of_queries = of_keys[len(keys) - n_tokens :, None]
    behind = of_queries - of_keys
    if slopes is not None:
        scores = scores - slopes[:, None, None] * np.abs(behind)
    if biases is not None:
        n = biases.shape[1] // 2
        scores = scores + biases[:, n - np.clip(behind, -n, n)]
    seen = (behind >= 0) | (not causal)
    if ends is not None:
        seen |= of_keys < ends[:, None]
        seen &= behind < (window or len(keys))
    else:
        seen &= np.abs(behind) < (window or len(keys))
    if begins is not None:
        seen &= of_keys >= begins[:, None]
    if prompts is not None:
        seen = of_keys < prompts[:, None]
    if chunk:
        seen &= of_queries // chunk == of_keys // chunk
    scores = np.where(seen, scores, -np.inf)
    sinks = np.full(n_heads, -np.inf) if sinks is None else sinks
    scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (n_heads, n_tokens, 1))], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hts,shd->thd", weights[..., :-1], values).reshape(n_tokens, -1)
