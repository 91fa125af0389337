"""DeepSeek V2 (arXiv:2405.04434), V3 and R1 (arXiv:2412.19437), Kimi K2 and GLM-4.7-Flash: multi-head latent
attention (MLA), and experts after a few dense layers.

The cache contains one latent and one rotated key per token, which all heads share. Queries are projected into the
space of the latents, and the output of attention is projected back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, RecordNorm, decoder, feed_forward, norm, read_q_scale
from localllm.models.config import Header
from localllm.models.hf_convert import Array, routing_keys
from localllm.models.rope import make_rope, read_rope, yarn_mscale
from localllm.models.weights import HeadsOf

HF_MEANT = {"first_k_dense_replace": (), "n_group": (), "topk_group": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    """Return the keys of attention with the latents as the only key/value head."""
    multiplier = _scale_multiplier(config.rope_parameters)
    has_experts = getattr(config, "n_routed_experts", None) is not None  # Youtu-LLM is dense
    if not has_experts:
        config.skip("moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor")
        config.skip("n_shared_experts", "scoring_func", "topk_method", "mlp_layer_types")
    dense = {
        "leading_dense_block_count": config.num_hidden_layers,
        "expert_shared_count": 0,
        "expert_feed_forward_length": config.intermediate_size,
    }
    return (routing_keys(config) if has_experts else dense) | {
        "vocab_size": config.vocab_size,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": multiplier and 0.1 * multiplier,
    }


def _scale_multiplier(rope: Any) -> float | None:
    """Return YaRN's "mscale_all_dim", whose square is a factor of the scale of scores.

    Raises ModelError if the rotated values have a magnitude as well.
    """
    first, last = rope.get("mscale"), rope.get("mscale_all_dim")
    if not last or rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "yarn" or (first or 0) != last or rope.get("attention_factor") not in (None, 1.0):
        raise ModelError(
            f"config.json scales its rotation with mscale = {quoted(first)} and mscale_all_dim = {quoted(last)}: "
            "GGUF files can only describe YaRN with two equal values"
        )
    return float(last)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split each head's matrix into the projections of queries to latents and of attention's output from latents."""
    if not name.endswith("kv_b_proj.weight"):
        return array
    heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"attn_k_b.weight": k.swapaxes(1, 2), "attn_v_b.weight": v}


@dataclass(frozen=True)
class Latents:
    """Sizes of multi-head latent attention."""

    n_heads: int  # query heads
    n_latent: int  # values of a latent
    n_rot: int  # values of the rotated key that follows the latent
    # Values of a head's key and value before the projection to latents. The last n_rot values of a key are rotated.
    key_dim: int
    value_dim: int
    n_query: int  # width of the low-rank input of queries; 0 if queries are computed from the hidden state
    scale: float  # factor on scores

    @classmethod
    def read(
        cls, m: Header, scale: float = 1.0, *, has_value_length: bool = True, n_heads: int | None = None
    ) -> Latents:
        """Read a file's keys. Old files use other keys, which describe separate keys and values for each head.

        Without ``has_value_length``, the heads' values share the hidden width equally. By default, ``n_heads`` is the
        number for all layers in the file.
        """
        meta, n_layers = m.meta, m.config.n_layers
        n_heads = n_heads or meta.read_uniform("attention.head_count", n_layers, high=1 << 14)
        meta.skip("attention.head_count_kv", "attention.key_length", "attention.value_length")  # of the latents
        n_latent = meta.read("attention.kv_lora_rank", int, low=1, high=512)
        n_rot = meta.read("rope.dimension_count", int, low=0, high=128)
        is_old = meta.find("attention.key_length_mla") is None
        key_dim, value_dim = (
            meta.read(f"attention.{x}_length{'' if is_old else '_mla'}", int, low=2, high=1 << 12)
            if has_value_length or x == "key"
            else m.config.n_embd // n_heads
            for x in ("key", "value")
        )
        n_query = meta.read("attention.q_lora_rank", int, 0, low=0, high=1 << 16)
        return cls(n_heads, n_latent, n_rot, key_dim, value_dim, n_query, scale * key_dim**-0.5)


#: Selects the positions that tokens see, from a layer, its normed input and the queries' input. None: all positions.
Select = Callable[[Layer, Tensor, Tensor], Tensor | None]


def record(m: Header, select: Select | None = None, layer_norm: RecordNorm = norm) -> Graph:
    rope, scale = make_latent_rope(m)
    latents, q_scale = Latents.read(m, scale), read_q_scale(m)
    is_biased = f"blk.{m.config.n_layers - 1}.exp_probs_b.bias" in m.weights
    ffn = m.feed_forward(m.experts(norm_topk_prob=False, gating="sigmoid" if is_biased else "softmax"))

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = latent_attention(at, y, latents, rope, residual=x, q_scale=q_scale, select=select)
        return feed_forward(at, layer_norm(at, "ffn_norm", x), ffn, residual=x)

    return decoder(m, layer)


def make_latent_rope(m: Header) -> tuple[g.Rope, float]:
    """Return the rotation of the values after the latents, and a factor on scores.

    If the file contains the multiplier of YaRN's logarithm, the factor on scores is the square of YaRN's magnitude.
    Files store a tenth of "mscale_all_dim" as the multiplier.
    """
    n_rot = m.meta.read("rope.dimension_count", int, low=2, high=128)
    config = read_rope(m, n_rot)
    rope = make_rope(m, n_rot, interleaved=True)
    multiplier = 10 * config.yarn_log_multiplier
    first = m.meta.read("attention.kv_lora_rank", int, low=1, high=512)
    magnitude = 1.0 if multiplier else rope.magnitude
    return replace(rope, first=first, magnitude=magnitude), yarn_mscale(config.factor, multiplier) ** 2


def latent_attention(
    at: Layer,
    x: Tensor,
    latents: Latents,
    rope: g.Rope | None,
    *,
    residual: Tensor | None = None,
    q_scale: g.PositionScale | None = None,
    has_gate: bool = False,
    has_sinks: bool = False,
    select: Select | None = None,
) -> Tensor:
    """Latent attention to the positions from ``select``, by default all. Without ``rope``, vectors are not rotated.

    A file may contain ``attn_q_gate`` instead of ``attn_q_b``: the rows of each head's query and gate, for the normed
    and the raw result of ``attn_q_a``.
    """
    w, d, n, n_latent = at.weights, at.n_embd, latents.n_heads, latents.n_latent
    width, n_nope, cached = n * latents.key_dim, latents.key_dim - latents.n_rot, n_latent + latents.n_rot
    keys, selected, gate = w.matrix("attn_kv_a_mqa", d, cached), None, None
    if latents.n_query:
        raw, k = at.add(ops.Linears(x, (w.matrix("attn_q_a", d, latents.n_query), keys)))
        q = norm(at, "attn_q_a_norm", raw)
        if select is not None:
            selected = select(at, x, q)
        if "attn_q_gate.weight" in w:
            widths = {"query": width, "gate": n * latents.value_dim}
            matrices = w.split("attn_q_gate", 2 * latents.n_query, widths, n_groups=n)
            q, gate = at.add(ops.Linears(at.add(ops.SideBySide((q, raw))), matrices))
        else:
            q = at.add(ops.Linear(q, w.matrix("attn_q_b", latents.n_query, width)))
    else:
        q, k = at.add(ops.Linears(x, (w.matrix("attn_q", d, width), keys)))
    if "attn_k_b.weight" in w:
        to_latents = w.require("attn_k_b.weight", n, n_latent, n_nope)
        from_latents = w.require("attn_v_b.weight", n, latents.value_dim, n_latent)
        w.skip("attn_kv_b.weight")
    else:
        both = w.require("attn_kv_b.weight", n * (n_nope + latents.value_dim), n_latent)
        to_latents = HeadsOf(both, n, range(n_nope), is_transposed=True)
        from_latents = HeadsOf(both, n, range(n_nope, n_nope + latents.value_dim))
    if has_gate:
        gate = at.linear(x, "attn_gate", w.n_rows("attn_gate.weight"))
    sinks = w.vector("attn_sinks", n) if has_sinks else None
    cache = at.graph.kv_cache(1, cached, n_latent, values_in_keys=True)
    k_norm: g.HeadNorm | None = None
    if "attn_k_norm.weight" in w:
        k = at.add(ops.SideBySide(normed_parts(at, k, n_latent)))
    else:
        k_norm = g.HeadNorm(at.norm_eps, w.vector("attn_kv_a_norm", n_latent))
    q = at.add(
        ops.RopeAppend(at.add(ops.HeadLinear(q, to_latents)), k, None, cache, rope, k_norm=k_norm, q_scale=q_scale)
    )
    y = at.add(
        ops.HeadLinear(at.add(ops.Attention(q, cache, latents.scale, sinks=sinks, selected=selected)), from_latents)
    )
    if gate is not None:
        y = at.add(ops.HeadGate(y, gate, "sigmoid") if gate.width == n else ops.Gated(gate, y, "sigmoid"))
    return at.linear(y, "attn_output", d, residual=residual)


def normed_parts(at: Layer, k: Tensor, n_latent: int) -> tuple[Tensor, Tensor]:
    """Return the normed latent and the normed rotated part of a key."""
    parts = range(n_latent), range(n_latent, k.width)
    latent, rotated = (at.add(ops.Columns(k, part)) for part in parts)
    return norm(at, "attn_kv_a_norm", latent), norm(at, "attn_k_norm", rotated)
