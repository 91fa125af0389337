"""MiMo V2: layers with a window have sinks, more key/value heads and a separate rotation. Values are narrower than
keys, and the output of attention is scaled."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, add, attention, decoder, feed_forward, norm
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, implied, routing_keys, sliding_window, window_pattern
from localllm.models.rope import make_local_rope, make_rope

HF_NAMES = {"self_attn.qkv_proj": "attn_qkv"}
HF_MEANT = {"add_full_attention_sink_bias": (False,), "add_swa_attention_sink_bias": (True,)} | implied(
    "attention_chunk_size attention_projection_layout moe_layer_freq processor_config topk_method"
)


def hf_keys(config: Any) -> dict[str, Any]:
    n_kv, rope = config.num_key_value_heads, config.rope_parameters
    pattern = [bool(flag) for flag in config.get("hybrid_layer_pattern") or ()] or window_pattern(config)
    n_local = config.get("swa_num_key_value_heads") or 2 * n_kv
    part = rope.get("full_attention", rope)["partial_rotary_factor"]
    keys = sliding_window(config) | routing_keys(config)
    if (size := config.get("sliding_window_size")) is not None:  # without the token itself
        keys["attention.sliding_window"] = size + 1
    if (epsilon := config.get("layernorm_epsilon")) is not None:
        keys["attention.layer_norm_rms_epsilon"] = epsilon
    for name in ("head_dim", "v_head_dim", "num_attention_heads"):
        if (value := config.get(f"swa_{name}", config[name])) != config[name]:
            raise ModelError(
                f"config.json has swa_{name} = {quoted(value)} and {name} = {quoted(config[name])}, but a GGUF file "
                "contains one value for all layers"
            )
    return keys | {
        "attention.sliding_window_pattern": list(map(int, pattern)),
        "attention.head_count_kv": [n_local if has_window else n_kv for has_window in pattern],
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.get("attention_value_scale"),
        "rope.dimension_count": int(head_dim(config) * part),
    }


def record(m: Header) -> Graph:
    heads, ffn = m.heads_of_layers(), m.feed_forward(m.experts(gating="sigmoid"))
    windows = m.windows(period=1, kind=int)
    key_dim, _ = m.head_dims()
    rope, local_rope = make_rope(m, key_dim), make_local_rope(m, key_dim)
    scale = m.meta.read("attention.value_scale", float, 1.0, low=0.0, high=1e6)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, window = norm(at, "attn_norm", x), windows[at.number]
        own_rope = local_rope if window else rope
        y = attention(at, y, heads[at.number], own_rope, window=window, has_sinks=bool(window))
        x = add(at, y, x, scale)
        return feed_forward(at, norm(at, "ffn_norm", x), ffn, residual=x)

    return decoder(m, layer)
