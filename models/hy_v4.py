"""Hunyuan 4: latent attention, with sinks and a gate per value, to positions that an indexer selects; experts with
clamped gates; and four residual streams. The weighted sum of the streams is the input of attention and of the MLP,
and the output is added to all streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import HyperWeights, Linear, MixStreams, RMSNorm, SideBySide
from localllm.models import deepseek2, deepseek32
from localllm.models.blocks import Layer, decoder, feed_forward, norm
from localllm.models.config import Header
from localllm.models.hf_convert import axes_keys
from localllm.models.rope import with_axes

HF_NAMES = {"self_attn.linear_gate": "attn_gate", "self_attn.learnable_sink_param": "attn_sinks"}
for x in ("fn", "base", "scale"):
    HF_NAMES[f"hc_attn_layer.hc_pre.hc_{x}"] = f"hc_attn_{x}"
    HF_NAMES[f"hc_mlp_layer.hc_pre.hc_{x}"] = f"hc_ffn_{x}"
    HF_NAMES[f"model.hc_head.hc_head_{x}"] = f"output_hc_{x}"
hf_tensor = deepseek32.hf_tensor


def hf_keys(config: Any) -> dict[str, Any]:
    if (getattr(config, "n_group", None) or 1) > 1:
        raise ModelError("config.json has experts in groups, which GGUF files of Hunyuan 4 have no key for")
    dense = sum(kind == "dense" for kind in config.mlp_layer_types)
    return (
        deepseek32.hf_keys(config)
        | {
            "leading_dense_block_count": getattr(config, "first_k_dense_replace", dense),
            "expert_group_count": None,
            "expert_group_used_count": None,
            "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
            "hyper_connection.count": config.hc_mult,
            "hyper_connection.epsilon": config.hc_eps,
            "hyper_connection.magnitude": config.hc_magnitude,
        }
        | axes_keys(config)
    )


@dataclass(frozen=True)
class Connections:
    """Hyper-connections between ``n`` streams; `localllm.kernels.operations.HyperWeights` explains the numbers."""

    n: int
    eps: float
    magnitude: float
    more: float
    n_rounds: int  # 0 if streams are not mixed

    @classmethod
    def read(cls, m: Header, magnitude: float | None = None) -> Connections:
        """Read llama.cpp's keys. Without ``magnitude``, it is read from the file, and streams are not mixed."""
        meta = m.meta
        n = meta.read("hyper_connection.count", int, low=1, high=16)
        eps = meta.read("hyper_connection.epsilon", float, low=0, high=1)
        if magnitude is not None:
            return cls(
                n, eps, magnitude, 0.0, meta.read("hyper_connection.sinkhorn_iterations", int, low=1, high=100)
            )
        return cls(n, eps, meta.read("hyper_connection.magnitude", float, low=0, high=1e3), eps, 0)

    def weights(self, at: Layer, name: str, streams: Tensor, n_kinds: int) -> tuple[Tensor, ...]:
        n, d = self.n, at.n_embd
        n_weights = [n, 2 * n, 2 * n + n * n][n_kinds - 1]
        x = at.add(RMSNorm(streams, None, at.norm_eps))
        x = at.add(Linear(x, at.weights.matrix(f"{name}_fn", n * d, n_weights)))
        vectors = at.weights.vector(f"{name}_scale", n_kinds), at.weights.vector(f"{name}_base", n_weights)
        rounds = max(1, self.n_rounds)
        return at.add(HyperWeights(x, *vectors, n, self.eps, self.magnitude, self.more, rounds))

    def begin(self, at: Layer, x: Tensor) -> Tensor:
        return at.add(SideBySide((x,) * self.n))

    def before(self, at: Layer, name: str, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the input of attention or MLP, and the remaining weights for `behind`."""
        before, *remaining = self.weights(at, name, streams, 3 if self.n_rounds else 2)
        return at.add(MixStreams(streams, before, self.n)), tuple(remaining)

    def behind(self, at: Layer, y: Tensor, streams: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """Return the streams after attention or MLP, whose output is y."""
        if len(weights) > 1:
            streams = at.add(MixStreams(streams, weights[1], self.n))
        return at.add(MixStreams(y, weights[0], 1, streams))


def record(m: Header) -> Graph:
    rope, scale = deepseek2.make_latent_rope(m)
    rope = with_axes(m, rope, in_turn=True)
    experts, connections = m.experts(gating="sigmoid"), Connections.read(m)
    experts = experts and replace(experts, limits_input=True)
    latents, ffn, limits = deepseek2.Latents.read(m, scale), m.feed_forward(experts), m.gate_limits()
    select = None
    if m.meta.find("attention.indexer.top_k") is not None:
        dim = m.meta.read("attention.indexer.key_length", int, low=2, high=256)
        of_index = replace(rope, first=dim - latents.n_rot)
        select = deepseek32.make_indexers(m, of_index, m.norm_eps, (True,) * m.config.n_layers)

    def layer(at: Layer, streams: Tensor) -> Tensor:
        x, more = connections.before(at, "hc_attn", streams)
        x = norm(at, "attn_norm", x)
        y = deepseek2.latent_attention(at, x, latents, rope, has_gate=True, has_sinks=True, select=select)
        streams = connections.behind(at, y, streams, more)
        x, more = connections.before(at, "hc_ffn", streams)
        y = feed_forward(at, norm(at, "ffn_norm", x), ffn, limits=limits[at.number])
        return connections.behind(at, y, streams, more)

    def end(at: Layer, name: str, streams: Tensor) -> Tensor:
        (before,) = connections.weights(at, "output_hc", streams, 1)
        return norm(at, name, at.add(MixStreams(streams, before, connections.n)))

    return decoder(m, layer, change_embedding=connections.begin, output_norm=end)
