"""The blocks that architectures are assembled from.

A block finds its weights under the names that GGUF files give them, and records its operations in execution order.
Shapes as in `localllm.kernels.graph`: x is the residual stream [T, d].
"""

from __future__ import annotations

from collections.abc import Callable

from localllm.kernels.graph import (
    Attention,
    CacheType,
    Embed,
    ExpertLinears,
    ExpertOutput,
    Gated,
    Graph,
    HeadNorm,
    Linear,
    Linears,
    Outputs,
    RMSNorm,
    Rope,
    RopeAppend,
    Route,
    Tensor,
)
from localllm.models.config import ExpertConfig, ModelConfig
from localllm.models.weights import Weights

#: Records one layer: takes its weights and x, and gives the next x.
Layer = Callable[[Graph, Weights, Tensor], Tensor]


def decoder(config: ModelConfig, weights: Weights, cache_type: CacheType, layer: Layer) -> Graph:
    """Embedding, layers, final norm and head: from ids to logits [N, n_vocab]."""
    g, d = Graph(cache_type), config.n_embd
    x = g.add(Embed(weights.require("token_embd.weight", config.n_vocab, d)))
    for i in range(config.n_layers):
        g.layer = i
        x = layer(g, weights.layer(i), x)
    g.layer = "output"
    x = g.add(RMSNorm(g.add(Outputs(x)), weights.vector("output_norm", d), config.norm_eps))  # [N, d]
    g.add(Linear(x, weights.matrix("output", d, config.n_vocab, tied_to="token_embd")))
    return g


def attention(
    g: Graph,
    w: Weights,
    x: Tensor,
    config: ModelConfig,
    rope: Rope,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> Tensor:
    """Grouped-query attention with rotary positions, pre-normed, added to the residual stream.

    With ``qkv_bias``, query, key and value must have biases; else they may.  ``qk_norm``: of each head.
    """
    d, head_dim, eps = config.n_embd, config.head_dim, config.norm_eps
    q_width, kv_width = config.n_heads * head_dim, config.n_kv_heads * head_dim
    cache = g.kv_cache(config.n_kv_heads, head_dim, window=config.sliding_window)
    y = g.add(RMSNorm(x, w.vector("attn_norm", d), eps))
    widths = {"attn_q": q_width, "attn_k": kv_width, "attn_v": kv_width}
    matrices = tuple(w.matrix(name, d, width, bias=qkv_bias) for name, width in widths.items())
    q, k, v = g.add(Linears(y, matrices))  # [T, H * head_dim], [T, G * head_dim] twice
    q_norm, k_norm = (HeadNorm(eps, w.vector(f"attn_{x}_norm", head_dim)) if qk_norm else None for x in "qk")
    q = g.add(RopeAppend(q, k, v, cache, rope, q_norm, k_norm))
    y = g.add(Attention(q, cache, scale=head_dim**-0.5, window=config.sliding_window))
    return g.add(Linear(y, w.matrix("attn_output", q_width, d), residual=x))


def gated_mlp(g: Graph, w: Weights, x: Tensor, config: ModelConfig, *, activation: str = "silu") -> Tensor:
    """down(activation(gate(x)) * up(x)), pre-normed, added to the residual stream."""
    d, n_ff = config.n_embd, config.n_ff
    y = g.add(RMSNorm(x, w.vector("ffn_norm", d), config.norm_eps))
    gate, up = g.add(Linears(y, (w.matrix("ffn_gate", d, n_ff), w.matrix("ffn_up", d, n_ff))))  # [T, n_ff]
    return g.add(Linear(g.add(Gated(gate, up, activation)), w.matrix("ffn_down", n_ff, d), residual=x))


def mixture_mlp(
    g: Graph, w: Weights, x: Tensor, config: ModelConfig, experts: ExpertConfig, *, activation: str = "silu"
) -> Tensor:
    """A gated MLP for each of several experts, of which every token goes to a few; pre-normed, and their weighted sum
    is added to the residual stream.  Source: arXiv:2401.04088 (Mixtral)."""
    d, n, n_ff = config.n_embd, experts.n, experts.n_ff
    y = g.add(RMSNorm(x, w.vector("ffn_norm", d), config.norm_eps))
    logits = g.add(Linear(y, w.matrix("ffn_gate_inp", d, n)))  # [T, E]
    routing = g.add(Route(logits, experts.n_used, norm_topk_prob=True, scale=experts.scale))
    matrices = w.experts("ffn_gate_exps", n, d, n_ff), w.experts("ffn_up_exps", n, d, n_ff)
    gate, up = g.add(ExpertLinears(y, matrices, routing))  # [T * k, n_ff]
    h = g.add(Gated(gate, up, activation))
    return g.add(ExpertOutput(h, w.experts("ffn_down_exps", n, n_ff, d), routing, residual=x))
