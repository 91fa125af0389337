"""Rotary frequencies from hyper-parameters."""

from __future__ import annotations

import numpy as np

from localllm.kernels.ops import Rope
from localllm.models.config import ModelConfig
from localllm.models.weights import Weights


def make_rope(config: ModelConfig, weights: Weights, *, interleaved: bool) -> Rope:
    exponents = np.arange(0, config.n_rot, 2, dtype=np.float64) / config.n_rot
    return Rope((config.rope_theta**-exponents).astype(np.float32), interleaved)
