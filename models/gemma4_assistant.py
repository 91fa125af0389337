"""Gemma 4's assistants: drafters whose layers only have queries, and read the keys and values of a Gemma 4 model.

From the target model's embedding of the last token and its normed hidden state of the token before, an assistant
computes a hidden state. The assistant's head predicts a draft from it. For the next draft, the hidden state takes the
place of the target's. Because nothing is appended to the cache, all drafts of a round have the position of the last
token. Heads that select clusters of tokens (E2B, E4B) are not used, as in llama.cpp: the complete head gives the same
or better drafts.

Source: transformers' ``gemma4_assistant``, and ``SinglePositionMultiTokenCandidateGenerator``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, HeadNorm, KVCache, Matrix, Rows, Tensor
from localllm.kernels.operations import Attention, Embed, Input, Linear, Outputs, RopeAppend, Scale
from localllm.models import gemma4
from localllm.models.blocks import Layer, add, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_local_rope, make_rope
from localllm.models.weights import split_columns

HF_NAMES = {f"{name}_projection": f"nextn.{name}_projection" for name in ("pre", "post")}
HF_MEANT = gemma4.HF_MEANT
hf_extra = gemma4.hf_extra


def hf_keys(config: Any) -> dict[str, Any]:
    return gemma4.hf_keys(config) | {
        "embedding_length_out": config.backbone_hidden_size,
        "nextn_predict_layers": config.num_hidden_layers,
    }


def record(m: Header) -> Graph:
    """Record a graph from normed hidden states [T, n] of the target to logits of drafts. It watches the next states.

    Without a target, the input consists of the target's embeddings, followed by the hidden states [T, 2 n].
    """
    meta, w, d, n_layers = m.meta, m.weights, m.config.n_embd, m.config.n_layers
    windows, heads, n_ff = m.windows(period=6), gemma4.read_heads(m), m.mlp_width()
    width = meta.read("embedding_length_out", int, low=1, high=1 << 20)
    meta.read("attention.shared_kv_layers", int, n_layers, low=n_layers, high=n_layers)
    meta.read("embedding_length_per_layer_input", int, 0, low=0, high=0)
    meta.skip("final_logit_softcapping")  # the target's soft-cap, which is not applied to drafts
    full, local = (m.head_dims(suffix)[0] for suffix in ("", "_swa"))
    # The position of a query follows the last position in the cache.
    rope, local_rope = (
        replace(rotation, position_offset=1) for rotation in (make_rope(m, full), make_local_rope(m, local or full))
    )
    target = m.target
    if target is None:
        graph = Graph(m.cache_type)
        e, h = (graph.add(Input(Tensor(Rows.TOKENS, width), first, 2 * width)) for first in (0, width))
    else:
        graph = Graph(target.cache_type, caches=dict(target.caches), windows=list(target.windows), caches_of=target)
        embed = next(node.operation for node in target.nodes if isinstance(node.operation, Embed))
        if embed.result.width != width:
            raise ModelError(
                f"the assistant needs hidden states of {width:,} values, but this model's have "
                f"{embed.result.width:,}: choose the assistant of this model"
            )
        h = graph.add(Input(Tensor(Rows.TOKENS, width)))
        e = graph.add(Embed(embed.table, embed.scale))
    graph.layer = 0
    of_e, of_h = split_columns(w.require("nextn.pre_projection.weight", d, 2 * width))
    x = graph.add(Linear(h, Matrix(of_h), residual=graph.add(Linear(e, Matrix(of_e)))))
    for i, window in enumerate(windows):
        graph.layer = i
        at = Layer(i, graph, w.layer(i), d, m.norm_eps, e)
        cache = _cache(graph, heads[i].n_kv, heads[i].key_dim, window, is_own=target is None)
        q_norm = HeadNorm(at.norm_eps, at.weights.vector("attn_q_norm", heads[i].key_dim))
        q = at.linear(norm(at, "attn_norm", x), "attn_q", heads[i].n * heads[i].key_dim)
        q = at.add(RopeAppend(q, None, None, cache, local_rope if window else rope, q_norm))
        y = at.add(Attention(q, cache, 1.0, window=window and window - 1))
        x = add(at, norm(at, "post_attention_norm", at.linear(y, "attn_output", d)), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), n_ff, activation="gelu")
        x = add(at, norm(at, "post_ffw_norm", y), x)
        x = at.add(Scale(x, weight=at.weights.require("layer_output_scale.weight", 1)))
    graph.layer = "output"
    at = Layer(-1, graph, w, d, m.norm_eps, e)
    y = norm(at, "output_norm", at.add(Outputs(x)))
    graph.watched.add(at.linear(y, "nextn.post_projection", width))
    at.add(Linear(y, w.matrix("token_embd", d, m.config.n_vocab)))
    return graph


def _cache(graph: Graph, n_heads: int, dim: int, window: int | None, *, is_own: bool) -> KVCache:
    """Return the cache of the target's last layer with this window."""
    if is_own:
        return graph.kv_cache(n_heads, dim, window=window)
    caches = [cache for cache in graph.caches.values() if cache.window == window]
    if not caches or (caches[-1].n_heads, caches[-1].key_dim) != (n_heads, dim):
        raise ModelError("its attention does not fit the model's last layers: choose the assistant of this model")
    return caches[-1]
