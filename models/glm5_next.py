"""GLM-5.3 Flash: three of four layers are Kimi Linear's delta nets. The fourth is latent attention without rotation
to runs of positions that an indexer selects. Hyper-connections (arXiv:2512.24880) connect several streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import Columns, MixStreams, Scale
from localllm.models import deepseek2, deepseek32, hy_v4, kimi_linear
from localllm.models.blocks import Layer, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats

HF_NAMES = {f"hc_{half}_{x}": f"hc_{half}_{x}" for half in ("attn", "ffn") for x in ("fn", "base", "scale")}
HF_NAMES |= {f"self_attn.indexer.index_kpool_compress_{x}": f"indexer_compressor_{x}" for x in ("gate", "ape")}


def hf_keys(config: Any) -> dict[str, Any]:
    linear, n = getattr(config, "linear_attn_config", None) or {}, config.num_hidden_layers
    return deepseek32.hf_keys(config) | {
        "attention.head_count_kv": [int(kind != "linear_attention") for kind in config.layer_types],
        "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.kpool": config.index_kpool,
        "attention.indexer.kpool_select_tail": config.index_kpool_always_select_tail,
        "leading_dense_block_count": sum(kind == "dense" for kind in config.mlp_layer_types),
        "rope.freq_base": None,
        "rope.scaling.yarn_log_multiplier": None,
        "kda.head_dim": linear.get("head_dim") or config.linear_head_dim,
        "kda.gate_lower_bound": linear.get("gate_lower_bound") or config.linear_lower_bound,
        "ssm.conv_kernel": linear.get("short_conv_kernel_size") or config.linear_conv_kernel_dim,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
        "swiglu_clamp_exp": [config.swiglu_limit] * n,
        "swiglu_clamp_shexp": [config.swiglu_limit] * n,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name.endswith("A_log"):
        return -np.exp(floats(array)).reshape(-1)
    return array.reshape(1, -1, 1, array.shape[-1]) if "conv1d" in name else deepseek32.hf_tensor(name, array, config)


def record(m: Header) -> Graph:
    meta, d, n_layers = m.meta, m.config.n_embd, m.config.n_layers
    latents, experts, limits = deepseek2.Latents.read(m), m.experts(gating="sigmoid"), m.gate_limits()
    experts = experts and replace(experts, limits_input=True)
    ffn, connections = m.feed_forward(experts), hy_v4.Connections.read(m, magnitude=2.0)
    n_kv = meta.read_each("attention.head_count_kv", n_layers, int, low=0, high=1 << 14)
    dim = meta.read("kda.head_dim", int, low=16, high=1 << 10)
    bound = meta.read("kda.gate_lower_bound", float, 0.0, low=-1e3, high=0)
    kernel = meta.read("ssm.conv_kernel", int, low=2, high=8)
    select = deepseek32.make_indexers(m, None, 1e-6, (True,) * n_layers)

    def layer(at: Layer, streams: Tensor) -> Tensor:
        x, more = connections.before(at, "hc_attn", streams)
        x = norm(at, "attn_norm", x)
        if n_kv[at.number]:
            y = deepseek2.latent_attention(at, x, latents, None, select=select)
        else:
            y = kimi_linear.delta_net(at, x, latents.n_heads, dim, kernel, bound=bound)
        streams = connections.behind(at, y, streams, more)
        x, more = connections.before(at, "hc_ffn", streams)
        x, experts, limit = norm(at, "ffn_norm", x), ffn.experts_of(at.number), limits[at.number]
        if experts is None:
            y = gated_mlp(at, x, ffn.n_ff, limit=limit[1], limits_input=True)
        else:
            y = mixture(at, x, experts, limits=limit)
        return connections.behind(at, y, streams, more)

    def end(at: Layer, name: str, streams: Tensor) -> Tensor:
        n = connections.n
        first, remaining = at.add(Columns(streams, range(d))), at.add(Columns(streams, range(d, n * d)))
        total = at.add(MixStreams(remaining, None, n - 1, first, offset=1.0))
        return norm(at, name, at.add(Scale(total, 1 / n)))

    return decoder(m, layer, change_embedding=connections.begin, output_norm=end)
