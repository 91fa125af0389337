"""MPT (MosaicML, 2023): LayerNorm, and scores that fall with the distance (ALiBi).

SEA-LION 7B has learnt positions instead, and a LayerNorm of query and key.
"""

from __future__ import annotations

from typing import Any, Literal

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp, position_embedding
from localllm.models.config import Header

HF_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_q_norm": "attn.q_ln",
    "attn_k_norm": "attn.k_ln",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_ABSENT = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")


def hf_keys(config: Any) -> dict[str, Any]:
    settings = config.attn_config
    if settings.get("softmax_scale"):
        raise ModelError("config.json has an attn_config with softmax_scale, which localllm does not convert")
    return dict.fromkeys(_ABSENT) | {
        "feed_forward_length": getattr(config, "expansion_ratio", 4) * config.hidden_size,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": settings.get("clip_qkv"),
        "attention.max_alibi_bias": settings.get("alibi_bias_max", 8) if settings.get("alibi", True) else 0.0,
        "attention.head_count_kv": settings.get("kv_n_heads"),
    }


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    max_bias = m.meta.read("attention.max_alibi_bias", float, low=0.0, high=1e3)
    clamp = m.meta.read("attention.clamp_kqv", float, 0.0, low=0.0, high=1e6)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        qk_norm: Literal["layer"] | None = "layer" if "attn_q_norm.weight" in at.weights else None
        x = attention(at, y, heads, None, residual=x, max_bias=max_bias, clamp=clamp, qk_norm=qk_norm)
        return mlp(at, layer_norm(at, "ffn_norm", x), n_ff, activation="gelu_erf", residual=x)

    change_embedding = position_embedding(m) if "position_embd.weight" in m.weights else None
    return decoder(m, layer, change_embedding=change_embedding, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
