"""DeepSeek V3.2 (arXiv:2512.02556), and GLM-5, 5.1 and 5.2: DeepSeek V3's layers, with attention to the positions
that an indexer selects, at most ``attention.indexer.top_k``.

In GLM-5.2, most layers use the selection of an earlier layer. If the context is at most ``top_k`` tokens, all
positions would be selected, and no indexer is recorded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Rope, Tensor
from localllm.kernels.operations import IndexSelect, Linear, Linears, RopeAppend, Scale, SideBySide
from localllm.models import deepseek2
from localllm.models.blocks import Layer, layer_norm
from localllm.models.config import Header

hf_tensor = deepseek2.hf_tensor

#: Context length of GLM-5.2. If its file lacks the types of indexers, the first three layers have an indexer, and
#: then every fourth layer.
_GLM_52_CONTEXT = 1 << 20


def hf_keys(config: Any) -> dict[str, Any]:
    types = getattr(config, "indexer_types", None)
    return deepseek2.hf_keys(config) | {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": types and [kind == "full" for kind in types],
    }


def record(m: Header) -> Graph:
    config, rope = m.config, replace(deepseek2.make_latent_rope(m)[0], first=0)
    every_fourth = config.architecture == "glm-dsa" and config.context_length >= _GLM_52_CONTEXT
    is_full = tuple(not every_fourth or i < 2 or i % 4 == 2 for i in range(config.n_layers))
    if config.architecture == "deepseek32":
        rope = replace(rope, interleaved=False)
    return deepseek2.record(m, make_indexers(m, rope, 1e-6, is_full))


def make_indexers(m: Header, rope: Rope | None, eps: float, is_full: tuple[bool, ...]) -> deepseek2.Select:
    """Return the selection of positions, or of runs of ``attention.indexer.kpool`` positions.

    Args:
        rope: rotation of the indexers' queries and keys.
        eps: epsilon of the indexers' norms.
        is_full: default of the types: whether each layer has an indexer. Other layers use the previous selection.
    """
    meta = m.meta
    n_heads = meta.read("attention.indexer.head_count", int, low=1, high=1 << 10)
    dim = meta.read("attention.indexer.key_length", int, low=2, high=256)
    k = meta.read("attention.indexer.top_k", int, low=1, high=1 << 16)
    n_query = meta.read("attention.q_lora_rank", int, low=1, high=1 << 16)
    if meta.find("attention.indexer.types") is not None:
        is_full = meta.read_each("attention.indexer.types", m.config.n_layers, bool, low=0, high=1)
    run = meta.read("attention.indexer.kpool", int, 1, low=1, high=64)
    if not meta.read("attention.indexer.kpool_select_tail", bool, True):
        raise ModelError(
            "the model's indexers skip positions after the last complete run, which localllm does not support yet"
        )
    # A block after the last layer without an indexer sees all positions, because there is no selection to reuse.
    is_full = (*is_full, f"blk.{m.config.n_layers}.indexer.attn_k.weight" in m.weights)
    selections: list[Tensor] = []  # selections of earlier layers

    def select(at: Layer, x: Tensor, of_query: Tensor) -> Tensor | None:
        w, matrices = at.weights, {"indexer.attn_k": dim, "indexer.proj": n_heads}
        if m.context <= k:
            names = "attn_q_b.weight attn_k.weight proj.weight k_norm.weight k_norm.bias"
            w.skip(*(f"indexer.{name}" for name in names.split()))
            w.skip("indexer_compressor_gate.weight", "indexer_compressor_ape.weight")
            return None
        if m.is_block and not is_full[at.number]:
            return None
        if not is_full[at.number]:
            if not selections:
                raise ModelError(f"{meta.architecture}.attention.indexer.types gives the first layer no indexer")
            return selections[-1]
        if run > 1:
            matrices["indexer_compressor_gate"] = dim
        projections = at.add(Linears(x, tuple(w.matrix(name, x.width, n) for name, n in matrices.items())))
        key, weights = projections[:2]
        key = layer_norm(replace(at, norm_eps=eps), "indexer.k_norm", key)
        q = at.add(Linear(of_query, w.matrix("indexer.attn_q_b", n_query, n_heads * dim)))
        pool, weights = None, at.add(Scale(weights, (n_heads * dim) ** -0.5))
        if run > 1:
            pool, key = (
                w.require("indexer_compressor_ape.weight", run, dim),
                at.add(SideBySide((key, projections[2], key))),
            )
        cache = at.graph.kv_cache(1, key.width, values_in_keys=True, is_index=True, is_exact=run > 1)
        if run > 1:  # no rotation
            at.add(RopeAppend(key, key, None, cache, None))
        else:
            q = at.add(RopeAppend(q, key, None, cache, rope))
        selections.append(at.add(IndexSelect(q, weights, cache, k, run, pool)))
        return selections[-1]

    return select
