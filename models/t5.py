"""T5's encoders (arXiv:1910.10683), such as sentence-t5 and gtr-t5.

Scores are not scaled, and have a learnt bias per distance, which is the only use of positions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import Attention, Clamp, RopeAppend
from localllm.models.blocks import Layer, decoder, gated_mlp, norm, query_key_value
from localllm.models.config import Header
from localllm.models.hf_convert import Array
from localllm.models.weights import DistanceBiases

HF_MEANT = {"dense_act_fn": (), "is_gated_act": (), "num_decoder_layers": (), "scale_decoder_outputs": ()}
_BIAS = "attn_rel_b.weight"


def hf_keys(config: Any) -> dict[str, Any]:
    if getattr(config, "relative_attention_max_distance", 128) != DistanceBiases.reach:
        raise ModelError("config.json has a relative_attention_max_distance other than 128, which GGUF files mean")
    kind = getattr(config, "feed_forward_proj", "relu")
    if kind not in ("relu", "gated-gelu"):
        raise ModelError(
            f"config.json has feed_forward_proj = {quoted(kind)}, but GGUF files mean relu or gated-gelu"
        )
    act = getattr(config, "dense_act_fn", None)
    if act not in (None, "relu", "gelu_new") or ((act == "gelu_new") == (kind == "relu") and act is not None):
        raise ModelError(f"config.json has dense_act_fn = {quoted(act)} with feed_forward_proj = {quoted(kind)}")
    eps = config.layer_norm_epsilon
    return {
        "context_length": getattr(config, "n_positions", None) or 512,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.head_count_kv": None,
        "rope.freq_base": None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Rename the embedding, which has two names, and MLPs, whose names differ with and without a gate."""
    if name.endswith("embed_tokens.weight"):
        return {"token_embd.weight": array}
    return {"ffn_up.weight": array} if name.endswith("wi_1.weight") else array


def record(m: Header) -> Graph:
    heads, n_ff, d = m.heads(), m.mlp_width(), m.config.n_embd
    n_buckets = m.meta.read("attention.relative_buckets_count", int, low=4, high=1 << 12)
    first = m.weights.layer(0, "enc.").require("attn_rel_b.weight", n_buckets, heads.n)

    def layer(at: Layer, x: Tensor) -> Tensor:
        at = replace(at, weights=m.weights.layer(at.number, "enc."))
        biases = at.weights.require("attn_rel_b.weight", n_buckets, heads.n) if at.weights.n_rows(_BIAS) else first
        y = norm(at, "attn_norm", x)
        q, k, v, _ = query_key_value(at, y, heads)
        cache = at.graph.kv_cache(heads.n_kv, heads.key_dim, heads.value_dim)
        q = at.add(RopeAppend(q, k, v, cache, None))
        y = at.add(Attention(q, cache, 1.0, causal=False, biases=DistanceBiases(biases)))
        x = at.linear(y, "attn_o", d, residual=x)
        y = norm(at, "ffn_norm", x)
        if "ffn_gate.weight" in at.weights:
            return gated_mlp(at, y, n_ff, residual=x, activation="gelu")
        y = at.add(Clamp(at.linear(y, "ffn_up", n_ff), 0.0, math.inf))
        return at.linear(y, "ffn_down", d, residual=x)

    def output_norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return norm(at, f"enc.{name}", x)

    return decoder(m, layer, output_norm=output_norm)
