"""MiniMax-M3, text: MiniMax-M2 with a norm of each head of query and key, dense first layers, a shared expert and
gpt-oss's clamped gates. In most layers, an indexer selects blocks of positions for each key/value head.

If the context is not longer than the selected positions, all would be selected, and no indexer is recorded.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, HeadNorm, Rope, Tensor
from localllm.kernels.operations import IndexSelect, Linears, RopeAppend
from localllm.models import minimax_m2
from localllm.models.blocks import Layer, Select, llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import add_one_to_norms
from localllm.models.rope import make_rope

HF_NAMES = {f"self_attn.index_{name}": f"indexer.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
HF_MEANT = {"scoring_func": ("sigmoid",)}
hf_tensor = add_one_to_norms


def hf_keys(config: Any) -> dict[str, Any]:
    released = getattr(config, "sparse_attention_config", None) or {}

    def of_index(ours: str, theirs: str) -> int:
        return int(released.get(f"sparse_{theirs}") or getattr(config, f"index_{ours}"))

    kinds = getattr(config, "mlp_layer_types", None) or [
        "sparse" if is_sparse else "dense" for is_sparse in config.moe_layer_freq
    ]
    n_dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (given := getattr(config, name, value)) != value:
            raise ModelError(f"config.json has {name} = {quoted(given)}, but GGUF files mean {value}")
    return minimax_m2.hf_keys(config) | {
        "feed_forward_length": config.dense_intermediate_size,
        "leading_dense_block_count": n_dense,
        "expert_shared_count": config.shared_intermediate_size // config.intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": True,
        "attention.indexer.head_count": of_index("n_heads", "num_index_heads"),
        "attention.indexer.key_length": of_index("head_dim", "index_dim"),
        "attention.indexer.top_k": of_index("topk_blocks", "topk_blocks"),
        "attention.indexer.block_size": of_index("block_size", "block_size"),
        "attention.indexer.local_blocks": of_index("local_blocks", "local_block"),
    }


def record(m: Header) -> Graph:
    rope, experts = make_rope(m, m.heads().key_dim), m.experts(gating="sigmoid")
    return llama_like(
        m, rope, experts, qk_norm="head", activation="clamped_swiglu", select=make_indexers(m, rope, m.heads().n_kv)
    )


def make_indexers(m: Header, rope: Rope, n_kv: int) -> Select:
    """Return the selection of blocks of positions for each of ``n_kv`` key heads, in layers with an indexer."""
    meta = m.meta
    n = meta.read("attention.indexer.head_count", int, low=1, high=1 << 10)
    dim = meta.read("attention.indexer.key_length", int, low=2, high=256)
    size = meta.read("attention.indexer.block_size", int, low=1, high=1 << 10)
    n_blocks = meta.read("attention.indexer.top_k", int, low=1, high=1 << 10)
    n_last = meta.read("attention.indexer.local_blocks", int, low=1, high=n_blocks)
    if n != n_kv:
        raise ModelError(
            f"{meta.architecture}.attention.indexer.head_count is {n}, but the model has {n_kv} heads of keys, which "
            "need one each: the file is broken"
        )

    def select(at: Layer, x: Tensor) -> tuple[Tensor, bool] | None:
        w = at.weights
        if not w.n_rows("indexer.q_proj.weight"):
            return None
        if m.context <= n_blocks * size:
            w.skip(*(f"indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")))
            return None
        q, key = at.add(
            Linears(x, (w.matrix("indexer.q_proj", x.width, n * dim), w.matrix("indexer.k_proj", x.width, dim)))
        )
        q_norm, k_norm = (HeadNorm(at.norm_eps, w.vector(f"indexer.{name}_norm", dim)) for name in "qk")
        cache = at.graph.kv_cache(1, dim, values_in_keys=True, is_index=True)
        q = at.add(RopeAppend(q, key, None, cache, rope, q_norm, k_norm))
        return at.add(IndexSelect(q, None, cache, n_blocks * size, size, n_last=n_last)), True

    return select
