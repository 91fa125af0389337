"""Rotary frequencies from hyper-parameters: plain, linear, YaRN and LongRoPE scaling, and explicit factors.

Llama 3's scaling needs no code here, because the files contain a factor for each frequency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Rope
from localllm.models.config import Header

#: Supported values of ``rope.scaling.type``.
SCALINGS = ("none", "linear", "yarn", "longrope")

#: Frequencies [n_rot / 2], in radians per position. Intermediate results are float64.
Frequencies = NDArray[np.float64]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float  # base of the frequencies
    n_rot: int  # values of each head that are rotated
    scaling: str  # one of `SCALINGS`
    factor: float  # scaled context length / original context length
    original_context: int  # tokens of context before scaling
    attn_factor: float  # factor on all rotated values
    yarn_ext_factor: float  # weight of extrapolation at high frequencies
    yarn_attn_factor: float | None  # replaces YaRN's magnitude if not None
    # Frequencies with more than yarn_beta_fast turns in the original context are not scaled. Frequencies with fewer
    # than yarn_beta_slow turns are divided by the full factor.
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_log_multiplier: float  # "mscale_all_dim" in config.json; 0 if absent


def read_rope(m: Header, head_dim: int, scaling: str | None = None) -> RopeConfig:
    """Read the rotation from a file's keys. ``scaling`` is the default type. Raises ModelError."""
    meta = m.meta
    n_rot = meta.read("rope.dimension_count", int, head_dim, low=2, high=head_dim)
    if n_rot % 2:
        raise ModelError(f"{meta.architecture}.rope.dimension_count is {n_rot}, but must be even: the file is broken")
    # As in llama.cpp, 0 means "no factor", and a factor without a type means linear scaling.
    old_factor = meta.read("rope.scale_linear", float, 0.0, low=0.0, high=1e6)
    factor = meta.read("rope.scaling.factor", float, old_factor, low=0.0, high=1e6) or 1.0
    if factor < 1e-3:
        raise ModelError(f"{meta.architecture}.rope.scaling.factor is {factor:g}, near 0: the file is broken")
    scaling = meta.read("rope.scaling.type", str, scaling or ("none" if factor == 1 else "linear"))
    if scaling not in SCALINGS:
        raise ModelError(
            f"{meta.architecture}.rope.scaling.type is {quoted(scaling)}, which localllm does not support; "
            f"it supports {', '.join(SCALINGS)}"
        )
    return RopeConfig(
        theta=meta.read("rope.freq_base", float, 10_000.0, low=2.0, high=1e15),
        n_rot=n_rot,
        scaling=scaling,
        factor=factor,
        original_context=m.config.original_context,
        attn_factor=meta.read("rope.scaling.attn_factor", float, 1.0, low=1e-3, high=1e3),
        yarn_ext_factor=meta.read("rope.scaling.yarn_ext_factor", float, 1.0, low=0.0, high=1.0),
        yarn_attn_factor=meta.read("rope.scaling.yarn_attn_factor", float, 0.0, low=0.0, high=1e3) or None,
        yarn_beta_fast=meta.read("rope.scaling.yarn_beta_fast", float, 32.0, low=1e-3, high=1e6),
        yarn_beta_slow=meta.read("rope.scaling.yarn_beta_slow", float, 1.0, low=1e-3, high=1e6),
        yarn_log_multiplier=meta.read("rope.scaling.yarn_log_multiplier", float, 0.0, low=0.0, high=1e3),
    )


def make_rope(
    m: Header,
    head_dim: int,
    *,
    interleaved: bool = False,
    scaling: str | None = None,
    rounds_ramp: bool = True,
    part: float = 1.0,
    has_alpha: bool = False,
    theta: float | None = None,
) -> Rope:
    """Return the rotation from a file's keys and its frequency factors, if any.

    Args:
        interleaved: see `localllm.kernels.graph.Rope`.
        scaling: type of scaling if the keys do not name it; by default linear if the keys contain a factor.
        part: fraction of the values in the keys that is rotated.
        rounds_ramp: whether YaRN's ramp ends on whole dimensions, as in all implementations except gpt-oss's.
        has_alpha: whether ``rope.scaling.alpha`` stretches the base, see `stretched_base`.
        theta: base of the frequencies; by default ``rope.freq_base``.
    """
    rope = read_rope(m, head_dim, scaling)
    rope = replace(rope, theta=theta or rope.theta)
    if has_alpha and (alpha := m.meta.read("rope.scaling.alpha", float, 0.0, low=0.0, high=1e9)):
        rope = replace(rope, theta=stretched_base(rope.theta, alpha, rope.n_rot))
    factors = _frequency_factors(m, rope)
    rope = replace(rope, n_rot=int(rope.n_rot * part))
    frequencies = plain_frequencies(rope.theta, rope.n_rot) / factors[: rope.n_rot // 2]
    magnitude = rope.attn_factor
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "yarn":
        frequencies = _yarn_frequencies(rope, frequencies, rounds_ramp=rounds_ramp)
        magnitude *= _yarn_magnitude(rope)
    return Rope(frequencies.astype(np.float32), interleaved, magnitude)


def with_axes(m: Header, rope: Rope, *, in_turn: bool = False, order: tuple[int, ...] = (0, 1, 2)) -> Rope:
    """Return the rotation with axes (time, row, column) if the file defines them and batches contain images.

    ``rope.dimension_sections`` contains the number of frequencies per axis, in the ``order`` of axes: the first
    section of frequencies turns by the first axis, and so on. With ``in_turn``, frequencies turn by time, row and
    column in rotation until the section of rows or columns is used up, and the remaining frequencies turn by time.
    """
    name, n = f"{m.meta.architecture}.rope.dimension_sections", len(rope.frequencies)
    sections: Any = m.meta.find("rope.dimension_sections")
    if sections is None or not m.sees:
        m.meta.skip("rope.dimension_sections")
        return rope
    if not isinstance(sections, list | tuple) or any(not isinstance(s, int) or s < 0 for s in sections):
        raise ModelError(f"{name} is {quoted(sections)}, but must be at most four numbers: the file is broken")
    if sum(sections) != n or any(sections[len(order) :]):
        raise ModelError(f"{name} is {list(sections)}, but the model has {n} frequencies: the file is broken")
    axes = [axis for axis, section in zip(order, sections, strict=False) for _ in range(section)]
    if in_turn:
        time, rows, columns = (*sections, 0, 0, 0)[:3]
        axes = [i % 3 if i < 3 * (time, rows, columns)[i % 3] else 0 for i in range(n)]
    return replace(rope, axes=tuple(axes))


def make_local_rope(m: Header, head_dim: int, theta: float | None = None) -> Rope:
    """Return the unscaled rotation of layers with a window.

    The base is ``rope.freq_base_swa`` or, if the file has no such key, ``theta``, or else ``rope.freq_base``.
    """
    suffix = "" if m.meta.find("rope.dimension_count_swa") is None else "_swa"
    n_rot = m.meta.read(f"rope.dimension_count{suffix}", int, head_dim, low=2, high=head_dim)
    base = theta or m.meta.read("rope.freq_base", float, 10_000.0, low=2.0, high=1e15)
    base = m.meta.read("rope.freq_base_swa", float, base, low=2.0, high=1e15)
    return Rope(plain_frequencies(base, n_rot).astype(np.float32), interleaved=False)


def stretched_base(theta: float, alpha: float, n_rot: int) -> float:
    """Return the base that extends the context by a fixed factor ("NTK-aware" scaling, in Hunyuan's models)."""
    stretched: float = theta * alpha ** (n_rot / (n_rot - 2))
    return stretched


def plain_frequencies(theta: float, n_rot: int) -> Frequencies:
    """Return the unscaled frequencies theta^(-2i / n_rot)."""
    exponents = np.arange(0, n_rot, 2, dtype=np.float64) / n_rot
    frequencies: Frequencies = theta**-exponents
    return frequencies


def _frequency_factors(m: Header, rope: RopeConfig) -> Frequencies:
    """Return the divisors of the frequencies from the file, or 1.

    If sequences can be longer than the original context, LongRoPE uses its long factors for all sequences from the
    start, as in llama.cpp, because keys in the cache are already rotated.

    Sources: arXiv:2402.13753 (LongRoPE), and Llama 3.1's reference code, whose factors converters write to files.
    """
    weights = m.weights
    if rope.scaling == "longrope":
        names = ["rope_factors_long.weight", "rope_factors_short.weight"]
        long, short = (weights.values(name, rope.n_rot // 2) for name in names)
        factors = long if m.context > rope.original_context else short
    elif "rope_freqs.weight" in weights:
        names = ["rope_freqs.weight"]
        factors = weights.values(names[0], rope.n_rot // 2)
    else:
        return np.ones(1)
    if not (factors > 1e-6).all():  # also false for NaN
        raise ModelError(f"tensor {names[0]} contains a factor that is not a positive number: the file is broken")
    return factors


def _yarn_frequencies(rope: RopeConfig, frequencies: Frequencies, *, rounds_ramp: bool) -> Frequencies:
    """Return high frequencies unchanged and low frequencies divided by the factor, with a ramp between them.

    Source: arXiv:2309.00071, section 3.2.
    """
    low, high = _yarn_dimension(rope, rope.yarn_beta_fast), _yarn_dimension(rope, rope.yarn_beta_slow)
    if rounds_ramp:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.n_rot - 1)
    ramp = (np.arange(len(frequencies)) - low) / max(high - low, 0.001)
    mask = (1 - np.clip(ramp, 0, 1)) * rope.yarn_ext_factor
    scaled: Frequencies = frequencies * mask + frequencies / rope.factor * (1 - mask)
    return scaled


def _yarn_dimension(rope: RopeConfig, n_turns: float) -> float:
    """Return the (fractional) number of the pair that turns ``n_turns`` times within the original context."""
    return rope.n_rot * math.log(rope.original_context / (n_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_magnitude(rope: RopeConfig) -> float:
    """Return the factor on cosine and sine that sharpens attention in the longer context."""
    if rope.yarn_attn_factor is not None:
        return rope.yarn_attn_factor
    return yarn_mscale(rope.factor, 1.0) / yarn_mscale(rope.factor, rope.yarn_log_multiplier)


def yarn_mscale(factor: float, multiplier: float) -> float:
    """Return YaRN's magnitude ("mscale") for a context that is ``factor`` times longer than the original context."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1
