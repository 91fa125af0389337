"""DBRX: Llama's layers with experts, LayerNorms without biases, and clamped queries, keys and values."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mixture
from localllm.models.config import Header
from localllm.models.hf_convert import SILU, Array
from localllm.models.rope import make_rope

_EXPERTS = {"w1": "gate", "v1": "up", "w2": "down"}


def hf_keys(config: Any) -> dict[str, Any]:
    ffn, attn = config.ffn_config, config.attn_config
    if ffn.get("moe_normalize_expert_weights", 1.0) != 1.0:
        raise ModelError("config.json has moe_normalize_expert_weights other than 1, which GGUF files of DBRX mean")
    if ffn.get("ffn_act_fn") and ffn.ffn_act_fn.get("name", "silu") not in SILU:
        raise ModelError("config.json has an ffn_act_fn other than silu, which GGUF files of DBRX mean")
    ffn.skip("hidden_size")
    theta = float(attn.get("rope_theta", 10_000.0))
    if "rope_parameters" in config and config.rope_parameters["rope_theta"] != theta:
        raise ModelError(
            f"config.json has two bases of rotation: rope_parameters and attn_config.rope_theta = {theta:g}"
        )
    return {
        "feed_forward_length": ffn["ffn_hidden_size"],
        "expert_count": ffn["moe_num_experts"],
        "expert_used_count": ffn["moe_top_k"],
        "attention.head_count_kv": attn["kv_n_heads"],
        "attention.clamp_kqv": float(attn.get("clip_qkv") or 0.0),
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": theta,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split the matrices of all experts, which are stored as [experts * width, hidden width]."""
    kind = _EXPERTS.get(name.rpartition(".")[2])
    if kind is None:
        return array
    experts = array.reshape(config.ffn_config["moe_num_experts"], -1, array.shape[-1])
    return {f"ffn_{kind}_exps.weight": experts.swapaxes(1, 2) if kind == "down" else experts}


def record(m: Header) -> Graph:
    heads, experts, rope = m.heads(), m.required_experts(), make_rope(m, m.heads().key_dim)
    clamp = m.meta.read("attention.clamp_kqv", float, low=0.0, high=1e6)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, layer_norm(at, "attn_norm", x), heads, rope, clamp=clamp, residual=x)
        return mixture(at, layer_norm(at, "attn_output_norm", x), experts, residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
