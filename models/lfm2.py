"""LFM2 (arXiv:2511.23404), dense and with experts: most layers are short convolutions between gates, the others
attention with normed heads. LFM3 also has norms after attention and MLP, a gate per head, and a window in some
layers."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import CausalConv, Gated, Linears
from localllm.models.blocks import Layer, add, attention, decoder, feed_forward, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, attention_layers, expert_norm
from localllm.models.rope import make_local_rope, make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    has_experts = hasattr(config, "num_dense_layers")
    return {
        "feed_forward_length": _width(config),
        "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.head_count_kv": attention_layers(config, config.num_key_value_heads),
        "shortconv.l_cache": config.conv_L_cache,
        "leading_dense_block_count": getattr(config, "num_dense_layers", None),
        "expert_gating_func": 2 if has_experts else None,
    } | (_expert_keys(config) if has_experts else {})


def _expert_keys(config: Any) -> dict[str, Any]:
    scale = getattr(config, "routed_scaling_factor", 1.0)
    return expert_norm(config, usual=True) | ({} if scale == 1 else {"expert_weights_scale": float(scale)})


def _width(config: Any) -> int:
    """Return the width of an MLP. Configurations contain the width before an adjustment."""
    width, n = config.intermediate_size, getattr(config, "block_multiple_of", 1)
    multiplier = getattr(config, "block_ffn_dim_multiplier", None)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return int(width)
    width = int(2 * width / 3)
    return int(width if multiplier is None else -(-int(multiplier * width) // n) * n)


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    return array.squeeze(1) if name.endswith("conv.conv.weight") else array


def record(m: Header) -> Graph:
    heads, ffn = m.heads_by_layer(), m.feed_forward(m.experts(gating="sigmoid"))
    dim = next((h.key_dim for h in heads if h), m.config.n_embd)
    rope, local_rope, windows = make_rope(m, dim), make_local_rope(m, dim), m.windows(period=0)
    is_third = m.config.architecture == "lfm3"
    kernel = m.meta.read("shortconv.l_cache", int, low=2, high=8)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, own_heads, window = norm(at, "attn_norm", x), heads[at.number], windows[at.number]
        residual = None if is_third else x
        if own_heads:
            options: Any = {"window": window, "has_gate": is_third, "residual": residual}
            y = attention(at, y, own_heads, local_rope if window else rope, qk_norm="head", **options)
        else:
            y = short_convolution(at, y, kernel, residual=residual)
        if not is_third:
            return feed_forward(at, norm(at, "ffn_norm", y), ffn, residual=y)
        x = add(at, norm(at, "post_attention_norm", y), x)
        return add(at, norm(at, "post_ffw_norm", feed_forward(at, norm(at, "ffn_norm", x), ffn)), x)

    return decoder(m, layer, output_norm=lambda at, _, x: norm(at, "token_embd_norm", x))


def short_convolution(at: Layer, x: Tensor, kernel: int, *, residual: Tensor | None) -> Tensor:
    """Return out(c * conv(b * x)), with b, c and x from one matrix."""
    w, d = at.weights, at.n_embd
    b, c, x = at.add(Linears(x, w.split("shortconv.in_proj", d, {"b": d, "c": d, "x": d})))
    weight, state = w.require("shortconv.conv.weight", d, kernel), at.graph.state("conv", kernel - 1, d)
    y = at.add(CausalConv(at.add(Gated(b, x, "identity")), weight, state, w.find("shortconv.conv.bias", d)))
    return at.linear(at.add(Gated(c, y, "identity")), "shortconv.out_proj", d, residual=residual)
