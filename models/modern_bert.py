"""ModernBERT (arXiv:2412.13663): an encoder with norms without biases before attention and MLP.

The first of every three layers sees the complete text. The other layers see a window in both directions, and have
separate rotary frequencies.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, layer_norm
from localllm.models.config import Header
from localllm.models.hf_convert import encoder_keys, unscaled, window_pattern
from localllm.models.rope import make_local_rope, make_rope

#: By default, the first of this many layers has no window.
_PERIOD = 3


def hf_keys(config: Any) -> dict[str, Any]:
    pattern, period = window_pattern(config), getattr(config, "global_attn_every_n_layers", None)
    is_periodic = pattern == [bool(i % (period or _PERIOD)) for i in range(len(pattern))]
    keys = encoder_keys(config) | unscaled(config)
    return keys | {
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.sliding_window": config.local_attention,
        "attention.sliding_window_pattern": period if is_periodic else pattern,
        "hidden_activation": getattr(config, "hidden_activation", None),
        "vocab_size": config.vocab_size,
    }


def record(m: Header) -> Graph:
    heads, n_ff, meta = m.heads(), m.mlp_width(), m.meta
    rope, local_rope = make_rope(m, heads.key_dim), make_local_rope(m, heads.key_dim)
    activation = {"gelu": "gelu_erf"}.get(hidden := meta.read("hidden_activation", str, "gelu"), hidden)
    period = meta.find("attention.sliding_window_pattern")
    windows = m.windows(period=1)
    if not isinstance(period, list | tuple):
        window = meta.read("attention.sliding_window", int, 0, low=0, high=(1 << 32) - 1)
        windows = tuple(window if i % (period or _PERIOD) else None for i in range(m.config.n_layers))

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, window = x, windows[at.number]
        if at.number or "attn_norm.weight" in at.weights:
            y = layer_norm(at, "attn_norm", x)
        reach = window // 2 + 1 if window else None
        x = attention(at, y, heads, local_rope if window else rope, residual=x, window=reach)
        return gated_mlp(at, layer_norm(at, "ffn_norm", x), n_ff, residual=x, activation=activation)

    def embedding(at: Layer, x: Tensor) -> Tensor:
        return layer_norm(at, "token_embd_norm", x)

    return decoder(m, layer, change_embedding=embedding, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
