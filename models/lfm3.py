"""LFM3, in files of `localllm convert`. llama.cpp has no names for LFM3 yet, so names of LFM2 and others are used."""

from __future__ import annotations

from typing import Any

from localllm.models import lfm2
from localllm.models.hf_convert import Array, head_dim, proportional_factors, window_keys

HF_NAMES = {
    "self_attn.gate_proj": "attn_gate",
    "post_operator_norm": "post_attention_norm",
    "post_ffn_norm": "post_ffw_norm",
}
HF_MEANT = {"use_attention_gate": (True,), "use_sandwich_norm": (True,)}
hf_tensor, record = lfm2.hf_tensor, lfm2.record


def hf_keys(config: Any) -> dict[str, Any]:
    n_kv = [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]
    return lfm2.hf_keys(config) | window_keys(config) | {"attention.head_count_kv": n_kv}


def hf_extra(config: Any) -> dict[str, Array]:
    return proportional_factors(config, head_dim(config))
