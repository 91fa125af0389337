"""CodeShell (arXiv:2403.15747): LayerNorm, biases everywhere, and query, key and value in one matrix."""

from __future__ import annotations

from typing import Any

from localllm.models import starcoder2
from localllm.models.hf_convert import GELU_TANH

HF_MEANT = {"activation_function": GELU_TANH, "hidden_act": GELU_TANH}
record = starcoder2.record


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": getattr(config, "n_inner", None) or 4 * config.hidden_size,
        "attention.head_count_kv": getattr(config, "num_query_groups", None) or 1,
        "rope.freq_base": 10_000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 1.0,
    }
