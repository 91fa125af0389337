"""Phi-3, 3.5 and 4 (arXiv:2404.14219): one matrix for query, key and value, one for gate and up, and LongRoPE."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph
from localllm.models import hf_names
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, rotated_part
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def hf_keys(config: Any) -> dict[str, Any]:
    """Its files have no key for the kind of scaling."""
    original = config.rope_parameters["original_max_position_embeddings"]
    scale = config.max_position_embeddings / original
    keys = rotated_part(config) | {
        "attention.sliding_window": getattr(config, "sliding_window", None) or 0,
        "rope.scaling.original_context_length": original,
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.scaling.type": None,
    }
    if "long_factor" in config.rope_parameters:
        keys["rope.scaling.attn_factor"] = (1 + np.log(max(scale, 1)) / np.log(original)) ** 0.5
    return keys


def hf_extra(config: Any) -> dict[str, Array]:
    factors = {kind: config.rope_parameters.get(f"{kind}_factor") for kind in ("long", "short")}
    return {f"rope_factors_{kind}.weight": np.array(f, np.float32) for kind, f in factors.items() if f}


def record(m: Header) -> Graph:
    # Files do not say that it is LongRoPE, but have its factors.
    scaling = "longrope" if "rope_factors_long.weight" in m.weights else None
    rope = make_rope(m, m.heads().key_dim, scaling=scaling)
    return llama_like(m, rope, windows=m.windows(period=0))
