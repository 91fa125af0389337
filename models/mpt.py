"""MPT (MosaicML, 2023): LayerNorm, and scores that fall with the distance (ALiBi)."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp
from localllm.models.config import Header

HF_NAMES = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_ABSENT = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")


def hf_keys(config: Any) -> dict[str, Any]:
    settings = config.attn_config
    if settings.get("qk_ln") or settings.get("softmax_scale") or not settings.get("alibi", True):
        raise ModelError(
            "config.json has an attn_config with qk_ln or softmax_scale, or without alibi, which localllm does not "
            "convert"
        )
    return dict.fromkeys(_ABSENT) | {
        "feed_forward_length": getattr(config, "expansion_ratio", 4) * config.hidden_size,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": settings.get("clip_qkv"),
        "attention.max_alibi_bias": settings.get("alibi_bias_max", 8),
        "attention.head_count_kv": settings.get("kv_n_heads"),
    }


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    max_bias = m.meta.read("attention.max_alibi_bias", float, low=1e-3, high=1e3)
    clamp = m.meta.read("attention.clamp_kqv", float, 0.0, low=0.0, high=1e6)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = attention(at, y, heads, None, residual=x, max_bias=max_bias, clamp=clamp)
        return mlp(at, layer_norm(at, "ffn_norm", x), n_ff, activation="gelu_erf", residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
