"""Gemma 4: layers with and without a window, with different heads; embeddings for every layer (E2B, E4B); layers that
use the keys and values of an earlier layer; and experts in parallel to the MLP (26B).

Tokens of an image see each other in layers with a window, but not in models with embeddings for every layer.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, add, chosen_experts, decoder, gated_mlp, norm, read_softcap, route
from localllm.models.config import Experts, Header, Heads
from localllm.models.hf_convert import GELU_TANH, Array, proportional_factors, window_keys, window_pattern
from localllm.models.rope import make_local_rope, make_rope
from localllm.models.weights import Weights

HF_NAMES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
HF_MEANT = {
    "hidden_activation": GELU_TANH,
    "hidden_act": (),
    "per_layer_config": (),
    "enable_moe_block": (),
    "use_bidirectional_attention": (False, "vision"),
}


def _full_attention(config: Any, name: str) -> int:
    """Return a setting of the layers without a window, which differs from the layers with a window."""
    names = {"head_dim": "global_head_dim"}
    if config.attention_k_eq_v:
        names["num_key_value_heads"] = "num_global_key_value_heads"
    layers, first = getattr(config, "per_layer_config", None) or {}, config.layer_types.index("full_attention")
    whole = names.get(name)
    value: int = (
        (whole and getattr(config, whole, None)) or layers.get(str(first), {}).get(name) or getattr(config, name)
    )
    return value


def hf_keys(config: Any) -> dict[str, Any]:
    n, n_shared = config.num_hidden_layers, config.num_kv_shared_layers
    heads = {True: config.num_key_value_heads, False: _full_attention(config, "num_key_value_heads")}
    each = [heads[has_window] for has_window in window_pattern(config)]
    keys = {
        "attention.key_length": _full_attention(config, "head_dim"),
        "attention.value_length": _full_attention(config, "head_dim"),
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": heads[True] if heads[True] == heads[False] else each,
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", None) or 0,
        "rope.dimension_count": _full_attention(config, "head_dim"),
        "rope.dimension_count_swa": config.head_dim,
        "expert_used_count": getattr(config, "top_k_experts", None),
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [config.intermediate_size * (1 + (i >= n - n_shared)) for i in range(n)]
    return keys | window_keys(config)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Keep the gate and up matrices of experts in one tensor."""
    return {"ffn_gate_up_exps.weight": array} if name.endswith("experts.gate_up_proj") else array


def hf_extra(config: Any) -> dict[str, Array]:
    """Return factors that set all but the first frequencies of layers without a window to 0."""
    return proportional_factors(config, _full_attention(config, "head_dim"))


def record(m: Header) -> Graph:
    meta, n_layers, d = m.meta, m.config.n_layers, m.config.n_embd
    windows, heads, experts = m.windows(period=6, default=None), read_heads(m), m.experts()
    widths = meta.read_each("feed_forward_length", n_layers, int, low=1, high=1 << 24)
    n_shared = meta.read("attention.shared_kv_layers", int, 0, low=0, high=n_layers - 1)
    n_per_layer = meta.read("embedding_length_per_layer_input", int, 0, low=0, high=1 << 16)
    full, local = (m.head_dims(suffix)[0] for suffix in ("", "_swa"))
    rope, local_rope = make_rope(m, full), make_local_rope(m, local or full)

    def layer(at: Layer, x: Tensor) -> Tensor:
        window = windows[at.number]
        # The remaining layers use the keys and values of the last layer of their kind before them.
        sources = [i for i in range(n_layers - n_shared) if bool(windows[i]) == bool(window)]
        shared = sources[-1] if sources and at.number >= n_layers - n_shared else None
        y = norm(at, "attn_norm", x)
        has_spans = m.sees and window is not None and not n_per_layer
        y = attention(at, y, heads[at.number], local_rope if window else rope, window, shared, has_spans=has_spans)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), widths[at.number], activation="gelu")
        if experts and "ffn_gate_inp.weight" in at.weights:
            y = add(at, norm(at, "post_ffw_norm_1", y), routed(at, x, experts))
        x = add(at, norm(at, "post_ffw_norm", y), x)
        if n_per_layer:
            x = add(at, layer_embedding(at, x, at.embedding, m.weights, n_per_layer, n_layers), x)
        scale = at.weights.find("layer_output_scale.weight", 1)
        return x if scale is None else at.add(ops.Scale(x, weight=scale))

    return decoder(m, layer, embedding_scale=d**0.5, softcap=read_softcap(m, "final_logit_softcapping"))


def read_heads(m: Header) -> list[Heads]:
    """Return the heads of each layer. Heads of layers with a window have a different width."""
    n_layers = m.config.n_layers
    n = m.meta.read_uniform("attention.head_count", n_layers, high=1 << 14)
    n_kv = m.meta.read_each("attention.head_count_kv", n_layers, int, n, low=1, high=n)
    full, local = m.head_dims(), m.head_dims("_swa")
    dims = [(local if window else full)[0] or full[0] for window in m.windows(period=6, default=None)]
    if not full[0]:
        raise ModelError("the file has no gemma4.attention.key_length: is it complete?")
    return [Heads(n, kv, dim, dim) for kv, dim in zip(n_kv, dims, strict=True)]


def attention(
    at: Layer, x: Tensor, heads: Heads, rope: g.Rope, window: int | None, shared: int | None, *, has_spans: bool
) -> Tensor:
    """Attention with normed heads and scale 1. ``shared`` is the layer whose keys and values it uses.

    Without a matrix for values, the values are the keys before norm and rotation. A file may contain the three
    matrices in ``attn_qkv``.
    """
    w, d, width = at.weights, at.n_embd, heads.n_kv * heads.key_dim
    q_norm = g.HeadNorm(at.norm_eps, w.vector("attn_q_norm", heads.key_dim))
    widths, keys_and_values = {"attn_q": heads.n * heads.key_dim, "attn_k": width, "attn_v": width}, list[g.Matrix]()
    if w.n_rows("attn_qkv.weight"):
        query, *keys_and_values = w.split("attn_qkv", d, widths)
    else:
        query = w.matrix("attn_q", d, widths["attn_q"])
        names = ("attn_k", "attn_v") if w.n_rows("attn_v.weight") else ("attn_k",)
        keys_and_values += [] if shared is not None else [w.matrix(name, d, width) for name in names]
    if shared is not None:
        w.skip("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        cache: g.KVCache = at.graph.caches[shared]
        q = at.add(ops.RopeAppend(at.add(ops.Linear(x, query)), None, None, cache, rope, q_norm))
    else:
        cache = at.graph.kv_cache(heads.n_kv, heads.key_dim, window=window if at.causal else None)
        q, *kv = at.add(ops.Linears(x, (query, *keys_and_values)))
        k_norm = g.HeadNorm(at.norm_eps, w.vector("attn_k_norm", heads.key_dim))
        q = at.add(ops.RopeAppend(q, kv[0], kv[-1], cache, rope, q_norm, k_norm, g.HeadNorm(at.norm_eps)))
    y = at.add(ops.Attention(q, cache, 1.0, window, causal=at.causal, has_spans=has_spans))
    return at.linear(y, "attn_output", d)


def routed(at: Layer, x: Tensor, experts: Experts) -> Tensor:
    """Record the experts. The router's input is x normed and scaled; the experts have a separate norm."""
    y = at.add(ops.RMSNorm(x, at.weights.require("ffn_gate_inp.scale", at.n_embd), at.norm_eps))
    routing = route(at, at.add(ops.Scale(y, at.n_embd**-0.5)), experts)
    y = chosen_experts(at, norm(at, "pre_ffw_norm_2", x), experts, routing, "gelu")
    return norm(at, "post_ffw_norm_2", y)


def layer_embedding(at: Layer, x: Tensor, embedding: Tensor, weights: Weights, n: int, n_layers: int) -> Tensor:
    """Return the layer's embedding of each token: n values from a projection of the embedding and, if the file has a
    table, from the table."""
    projection = weights.split("per_layer_model_proj", at.n_embd, {str(i): n for i in range(n_layers)})[at.number]
    context = at.add(ops.Scale(at.add(ops.Linear(embedding, projection)), at.n_embd**-0.5))
    context = at.add(ops.RMSNorm(context, weights.vector("per_layer_proj_norm", n), at.norm_eps))
    if n_rows := weights.n_rows("per_layer_token_embd.weight"):
        table = weights.require("per_layer_token_embd.weight", n_rows, n_layers * n)
        columns = range(at.number * n, (at.number + 1) * n)
        token = at.add(ops.Embed(table, (n / 2) ** 0.5, columns))  # [T, n]
        context = at.add(ops.Add(context, token, 0.5**0.5))
    y = at.add(ops.Gated(at.linear(x, "inp_gate", n), context, "gelu"))
    return norm(at, "post_norm", at.linear(y, "proj", at.n_embd))
