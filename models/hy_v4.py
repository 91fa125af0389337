"""Hunyuan 4: attention over latents, with sinks and a gate of every value, to positions that an indexer chooses;
experts whose gates are clamped; and four streams, which each half of a layer sums up, and to which it adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.kernels.graph import Graph, HyperWeights, Linear, MixStreams, RMSNorm, SideBySide, Tensor
from localllm.models import deepseek2, deepseek32
from localllm.models.blocks import Layer, decoder, feed_forward, norm
from localllm.models.config import Header

HF_NAMES = deepseek32.HF_NAMES | {
    "attn_gate": "self_attn.linear_gate",
    "attn_sinks.weight": "self_attn.learnable_sink_param",
    **{
        f"hc_{ours}_{x}.weight": f"hc_{its}_layer.hc_pre.hc_{x}"
        for ours, its in (("attn", "attn"), ("ffn", "mlp"))
        for x in ("fn", "base", "scale")
    },
    **{f"output_hc_{x}.weight": f"model.hc_head.hc_head_{x}" for x in ("fn", "base", "scale")},
}
hf_tensor = deepseek32.hf_tensor


def hf_keys(config: Any) -> dict[str, Any]:
    dense = sum(kind == "dense" for kind in config.mlp_layer_types)
    return deepseek32.hf_keys(config) | {
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", dense),
        "expert_group_count": None,
        "expert_group_used_count": None,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": config.hc_eps,
        "hyper_connection.magnitude": config.hc_magnitude,
    }


def record(m: Header) -> Graph:
    meta, d = m.meta, m.config.n_embd
    experts = m.experts(gating="sigmoid")
    experts = experts and replace(experts, limits_input=True)
    rope, scale = deepseek2.make_latent_rope(m)
    latents, ffn, limits = (
        deepseek2.Latents.read(m, scale),
        m.feed_forward(experts),
        m.gate_limits(),
    )
    n = meta.read("hyper_connection.count", int, low=1, high=16)
    eps = meta.read("hyper_connection.epsilon", float, low=0, high=1)
    magnitude = meta.read("hyper_connection.magnitude", float, low=0, high=1e3)
    select = None
    if meta.find("attention.indexer.top_k") is not None:
        of_index = replace(
            rope, first=meta.read("attention.indexer.key_length", int, low=2, high=256) - latents.n_rot
        )
        select = deepseek32.make_indexers(m, of_index, m.norm_eps, (True,) * m.config.n_layers)

    def weights(at: Layer, name: str, streams: Tensor, n_kinds: int) -> tuple[Tensor, ...]:
        x = at.add(RMSNorm(streams, None, at.norm_eps))
        x = at.add(Linear(x, at.weights.matrix(f"{name}_fn", n * d, n_kinds * n)))
        scales, base = at.weights.vector(f"{name}_scale", n_kinds), at.weights.vector(f"{name}_base", n_kinds * n)
        return at.add(HyperWeights(x, scales, base, n, eps, magnitude, eps))

    def layer(at: Layer, streams: Tensor) -> Tensor:
        before, behind = weights(at, "hc_attn", streams, 2)
        x = norm(at, "attn_norm", at.add(MixStreams(streams, before, n)))
        y = deepseek2.latent_attention(at, x, latents, rope, has_gate=True, has_sinks=True, select=select)
        streams = at.add(MixStreams(y, behind, 1, streams))
        before, behind = weights(at, "hc_ffn", streams, 2)
        x = norm(at, "ffn_norm", at.add(MixStreams(streams, before, n)))
        y = feed_forward(at, x, ffn, limits=limits[at.number])
        return at.add(MixStreams(y, behind, 1, streams))

    def end(at: Layer, name: str, streams: Tensor) -> Tensor:
        (before,) = weights(at, "output_hc", streams, 1)
        return norm(at, name, at.add(MixStreams(streams, before, n)))

    return decoder(m, layer, change_embedding=lambda at, x: at.add(SideBySide((x,) * n)), output_norm=end)
