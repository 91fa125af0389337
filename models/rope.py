"""Rotary frequencies from hyper-parameters: plain, linear, YaRN and LongRoPE scaling, and explicit factors.

Llama 3's scaling needs nothing of its own: its files carry the factors, one a frequency.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Rope
from localllm.models.config import ModelConfig, RopeConfig
from localllm.models.weights import Weights

#: Frequencies [n_rot / 2]; float64 until they are finished.
Frequencies = NDArray[np.float64]


def make_rope(config: ModelConfig, weights: Weights, *, interleaved: bool) -> Rope:
    """The rotation that ``config`` and the frequency factors in the file, if any, describe.

    Raises:
        ModelError: factors are missing, have the wrong shape, or are no positive numbers.
    """
    rope = config.rope
    exponents = np.arange(0, rope.n_rot, 2, dtype=np.float64) / rope.n_rot
    frequencies = rope.theta**-exponents / _frequency_factors(rope, weights)
    magnitude = rope.attn_factor
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "yarn":
        frequencies = _yarn_frequencies(rope, frequencies)
        magnitude *= _yarn_magnitude(rope)
    return Rope(frequencies.astype(np.float32), interleaved, magnitude)


def _frequency_factors(rope: RopeConfig, weights: Weights) -> Frequencies:
    """What the frequencies are divided by: one a frequency if the file has them, else 1.

    Source: arXiv:2402.13753 (LongRoPE), and Llama 3.1's reference code, whose factors converters write out.
    """
    if rope.scaling == "longrope":
        names = ["rope_factors_long.weight", "rope_factors_short.weight"]
        long, short = (weights.values(name, rope.n_rot // 2) for name in names)
        factors = long if rope.long_factors else short
    elif "rope_freqs.weight" in weights:
        names = ["rope_freqs.weight"]
        factors = weights.values(names[0], rope.n_rot // 2)
    else:
        return np.ones(1)
    if not (factors > 1e-6).all():  # NaN is not greater either
        raise ModelError(f"tensor {names[0]} holds a factor that is no positive number: the file is broken")
    return factors


def _yarn_frequencies(rope: RopeConfig, frequencies: Frequencies) -> Frequencies:
    """Keeps high frequencies, divides low ones by the factor, and passes from one to the other by a ramp.

    Source: arXiv:2309.00071, section 3.2, with the ends of the ramp on whole dimensions as everyone's code has it.
    """
    low = math.floor(_yarn_dimension(rope, rope.yarn_beta_fast))
    high = math.ceil(_yarn_dimension(rope, rope.yarn_beta_slow))
    low, high = max(low, 0), min(high, rope.n_rot - 1)
    ramp = (np.arange(len(frequencies)) - low) / max(high - low, 0.001)
    kept = (1 - np.clip(ramp, 0, 1)) * rope.yarn_ext_factor
    return frequencies * kept + frequencies / rope.factor * (1 - kept)


def _yarn_dimension(rope: RopeConfig, n_turns: float) -> float:
    """The (fractional) pair of dimensions that turns ``n_turns`` times within the original context."""
    return rope.n_rot * math.log(rope.original_context / (n_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_magnitude(rope: RopeConfig) -> float:
    """The factor on cosine and sine that sharpens attention over the longer context."""
    if rope.yarn_attn_factor is not None:
        return rope.yarn_attn_factor
    return _yarn_mscale(rope.factor, 1.0) / _yarn_mscale(rope.factor, rope.yarn_log_multiplier)


def _yarn_mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1
