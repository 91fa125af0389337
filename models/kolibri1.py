"""Kolibri 1: norms before and after attention and experts, and a shared expert. Only layers with a window rotate.

The router adds a bias to the logits, selects the best experts, and weighs them with the sigmoid of their logits. GGUF
has no names for this architecture, so `localllm convert` uses the usual names.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import expert_norm, window_keys
from localllm.models.rope import make_rope

HF_NAMES = {
    "post_attn_norm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "post_ffn_norm": "post_ffw_norm",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "moe.router.expert_bias": "exp_probs_b.bias",
}


def hf_keys(config: Any) -> dict[str, Any]:
    return window_keys(config) | expert_norm(config, usual=True)


def record(m: Header) -> Graph:
    windows = m.windows(period=5)
    rope, has_windows = make_rope(m, m.heads().key_dim), any(windows)
    ropes = [rope if window or not has_windows else None for window in windows]
    experts = m.required_experts(gating="sigmoid_of_best")
    return llama_like(m, ropes, experts, windows=windows, qk_norm="head", post_norm_eps=m.norm_eps)
