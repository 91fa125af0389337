"""MPT (MosaicML, 2023): LayerNorm and ALiBi.

SEA-LION 7B has learnt positions instead of ALiBi, and a LayerNorm of query and key.
"""

from __future__ import annotations

from typing import Any, Literal

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp, position_embedding
from localllm.models.config import Header

HF_MEANT = {
    "embedding_fraction": (1.0,),
    "learned_pos_emb": (),
    "logit_scale": (0,),
    "norm_type": ("low_precision_layernorm",),
}
#: Settings of attention without a key in GGUF files, and the values that a file implies, with the default first.
_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention", "grouped_query_attention", "multiquery_attention"),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "rope": (False,),
    "sliding_window_size": (-1,),
    "softmax_scale": (None,),
}
_ABSENT = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")


def hf_keys(config: Any) -> dict[str, Any]:
    settings = getattr(config, "attn_config", None) or {}
    for name, usual in _ATTENTION.items():
        if (value := settings.get(name, usual[0])) not in usual:
            raise ModelError(f"config.json has attn_config.{name} = {quoted(value)}, which localllm does not convert")
    has_bias, bias = settings.get("alibi", True), settings.get("alibi_bias_max", 8)
    if not has_bias and not any(name.endswith("wpe.weight") for name in config.tensors):
        raise ModelError("config.json has attn_config.alibi = false, but the checkpoint has no positions")
    settings.get("qk_ln")  # the tensors contain the same information
    return dict.fromkeys(_ABSENT) | {
        "feed_forward_length": getattr(config, "expansion_ratio", 4) * config.hidden_size,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_epsilon", None) or 1e-5,
        "attention.clamp_kqv": settings.get("clip_qkv"),
        "attention.max_alibi_bias": bias if has_bias else 0.0,
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
