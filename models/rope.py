"""Rotary frequencies from hyper-parameters: plain, linear, YaRN and LongRoPE scaling, and explicit factors.

Llama 3's scaling needs nothing of its own: its files carry the factors, one a frequency.
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

#: ``rope.scaling.type`` values that are computed here.
SCALINGS = ("none", "linear", "yarn", "longrope")

#: Frequencies [n_rot / 2]; float64 until they are finished.
Frequencies = NDArray[np.float64]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float  # base of the frequencies
    n_rot: int  # values of each head that are rotated
    scaling: str  # one of `SCALINGS`
    factor: float  # how many times longer the context became by scaling
    original_context: int  # tokens of context before scaling
    attn_factor: float  # on the magnitude of all rotated values
    yarn_ext_factor: float  # weight of extrapolation at high frequencies
    yarn_attn_factor: float | None  # magnitude that takes the place of YaRN's own, if given
    # yarn_beta_fast, yarn_beta_slow: turns in the original context above which frequencies are kept, and below which
    # they are scaled in full
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_log_multiplier: float  # "mscale_all_dim", 0 if there is none


def read_rope(m: Header, head_dim: int, scaling: str | None = None) -> RopeConfig:
    """The rotation that a file's keys describe; ``scaling`` where they name none.  Raises ModelError."""
    meta = m.meta
    n_rot = meta.read("rope.dimension_count", int, head_dim, low=2, high=head_dim)
    if n_rot % 2:
        raise ModelError(f"{meta.architecture}.rope.dimension_count is {n_rot}, but must be even: the file is broken")
    # As in llama.cpp: 0 stands for "no factor", and a factor without a type scales linearly.
    old_factor = meta.read("rope.scale_linear", float, 0.0, low=0.0, high=1e6)
    factor = meta.read("rope.scaling.factor", float, old_factor, low=0.0, high=1e6) or 1.0
    if factor < 1e-3:
        raise ModelError(f"{meta.architecture}.rope.scaling.factor is {factor:g}, near 0: the file is broken")
    scaling = meta.read("rope.scaling.type", str, scaling or ("none" if factor == 1 else "linear"))
    if scaling not in SCALINGS:
        raise ModelError(
            f"{meta.architecture}.rope.scaling.type is {quoted(scaling)}, which localllm does not support; "
            f"it knows {', '.join(SCALINGS)}"
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
    """The rotation that a file's keys, and its frequency factors if it has any, describe.

    Args:
        interleaved: as `localllm.kernels.graph.Rope` has it.
        scaling: where the keys do not say what scales the frequencies; by default, a factor does.
        part: of the values that the keys say, those that rotate.
        rounds_ramp: whether YaRN's ramp ends on whole dimensions, as in all code but gpt-oss's.
        has_alpha: whether ``rope.scaling.alpha`` stretches the base, as `stretched_base` does.
        theta: the base, by default ``rope.freq_base``.
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
    """The rotation by a token's place in time, by row and by column, if the file has it and pictures are seen.

    ``rope.dimension_sections`` says how many frequencies turn by each: the first ones by time, and so on; or with
    ``in_turn``, one by each in turn, as far as there are so many by row or column, and the others by time.  Or they
    turn by the axes in ``order``.
    """
    name, n = f"{m.meta.architecture}.rope.dimension_sections", len(rope.frequencies)
    sections: Any = m.meta.find("rope.dimension_sections")
    if sections is None or not m.sees:
        m.meta.skip("rope.dimension_sections")
        return rope
    if not isinstance(sections, list | tuple) or any(not isinstance(s, int) or s < 0 for s in sections):
        raise ModelError(f"{name} is {quoted(sections)}, but must be up to four numbers: the file is broken")
    if sum(sections) != n or any(sections[len(order) :]):
        raise ModelError(f"{name} is {list(sections)}, but {n} frequencies turn: the file is broken")
    axes = [axis for axis, section in zip(order, sections, strict=False) for _ in range(section)]
    if in_turn:
        time, rows, columns = (*sections, 0, 0, 0)[:3]
        axes = [i % 3 if i < 3 * (time, rows, columns)[i % 3] else 0 for i in range(n)]
    return replace(rope, axes=tuple(axes))


def make_local_rope(m: Header, head_dim: int, theta: float | None = None) -> Rope:
    """The rotation of layers that see a window only, which nothing scales: of base ``rope.freq_base_swa``.

    Where the file has none, it is ``theta``, and without that the other layers'.
    """
    suffix = "" if m.meta.find("rope.dimension_count_swa") is None else "_swa"
    n_rot = m.meta.read(f"rope.dimension_count{suffix}", int, head_dim, low=2, high=head_dim)
    base = theta or m.meta.read("rope.freq_base", float, 10_000.0, low=2.0, high=1e15)
    base = m.meta.read("rope.freq_base_swa", float, base, low=2.0, high=1e15)
    return Rope(plain_frequencies(base, n_rot).astype(np.float32), interleaved=False)


def stretched_base(theta: float, alpha: float, n_rot: int) -> float:
    """The base that makes the context longer by a fixed factor, as Hunyuan's models have it ("NTK-aware")."""
    stretched: float = theta * alpha ** (n_rot / (n_rot - 2))
    return stretched


def plain_frequencies(theta: float, n_rot: int) -> Frequencies:
    """theta^(-2i / n_rot), without any scaling."""
    exponents = np.arange(0, n_rot, 2, dtype=np.float64) / n_rot
    frequencies: Frequencies = theta**-exponents
    return frequencies


def _frequency_factors(m: Header, rope: RopeConfig) -> Frequencies:
    """The divisors of the frequencies: one each if the file has them, else 1.

    Where sequences can pass the original context, LongRoPE takes its long factors, for the whole life of all of
    them, as llama.cpp: keys that are in the cache were rotated already.

    Source: arXiv:2402.13753 (LongRoPE), and Llama 3.1's reference code, whose factors converters write out.
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
    if not (factors > 1e-6).all():  # NaN is not greater either
        raise ModelError(f"tensor {names[0]} holds a factor that is not a positive number: the file is broken")
    return factors


def _yarn_frequencies(rope: RopeConfig, frequencies: Frequencies, *, rounds_ramp: bool) -> Frequencies:
    """Keeps high frequencies, divides low ones by the factor, and passes from one to the other by a ramp.

    Source: arXiv:2309.00071, section 3.2.
    """
    low, high = _yarn_dimension(rope, rope.yarn_beta_fast), _yarn_dimension(rope, rope.yarn_beta_slow)
    if rounds_ramp:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.n_rot - 1)
    ramp = (np.arange(len(frequencies)) - low) / max(high - low, 0.001)
    kept = (1 - np.clip(ramp, 0, 1)) * rope.yarn_ext_factor
    scaled: Frequencies = frequencies * kept + frequencies / rope.factor * (1 - kept)
    return scaled


def _yarn_dimension(rope: RopeConfig, n_turns: float) -> float:
    """The (fractional) pair of dimensions that turns ``n_turns`` times within the original context."""
    return rope.n_rot * math.log(rope.original_context / (n_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_magnitude(rope: RopeConfig) -> float:
    """The factor on cosine and sine that sharpens attention over the longer context."""
    if rope.yarn_attn_factor is not None:
        return rope.yarn_attn_factor
    return yarn_mscale(rope.factor, 1.0) / yarn_mscale(rope.factor, rope.yarn_log_multiplier)


def yarn_mscale(factor: float, multiplier: float) -> float:
    """YaRN's magnitude ("mscale") of a context that became so many times longer."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1
