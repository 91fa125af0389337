"""Granite 3 and 4, dense and with experts: Llama's layers, with scales on embedding, scores, residuals and logits.

In hybrid models, most layers have Mamba 2 instead of attention, without rotation. In models with windows
(``granite_swa``), heads have sinks, and some layers may have no rotation. MiniCPM 1 and 2 (arXiv:2404.06395) are the
same with different scales.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Rope, Tensor
from localllm.models.blocks import Layer, Mamba, add, attention, decoder, gated_mlp, mamba, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import (
    Array,
    attention_layers,
    interleave_query_and_key,
    mamba_keys,
    mamba_tensor,
    rotated_part,
    window_keys,
)
from localllm.models.rope import make_rope

HF_NAMES = {
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "self_attn.sinks": "attn_sinks",
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
}

#: Tensors that ``granite_swa`` does not split, and that have different names in Granite 3.
_SWA_EXPERTS = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "shared_mlp.input_linear": "ffn_up_shexp",
}


def hf_keys(config: Any) -> dict[str, Any]:
    if config.model_type == "minicpm":
        return {
            "embedding_scale": float(config.scale_emb),
            "residual_scale": config.scale_depth / config.num_hidden_layers**0.5,
            "logit_scale": config.hidden_size / config.dim_model_base,
        }
    keys = rotated_part(config) | {
        "vocab_size": config.vocab_size,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    }
    if config.model_type.endswith("_swa"):
        return keys | _window_keys(config)
    if (layers := deepstack_layers(config)) is not None:
        numbers = dict.fromkeys(range(config.num_hidden_layers), -1) | {
            layer: i for i, layer in enumerate(layers) if i
        }
        return keys | {"deepstack_mapping": [numbers[i] for i in range(config.num_hidden_layers)]}
    if config.model_type != "granitemoehybrid":
        return keys
    n_kv = attention_layers(config, config.num_key_value_heads)
    hybrid: dict[str, Any] = {"attention.head_count_kv": n_kv}
    if getattr(config, "position_embedding_type", None) != "rope":
        hybrid |= {"rope.scaling.finetuned": False, "context_length": 1 << 20}
    return keys | mamba_keys(config) | hybrid


def deepstack_layers(config: Any) -> list[int] | None:
    """Return the layers that add embeddings of images, in the order of the embeddings; None if the model sees none.

    Raises ModelError if the first layer adds no embedding, or a layer adds several embeddings.
    """
    if (pairs := getattr(config, "deepstack_layer_map", None)) is None:
        return None
    n = config.num_hidden_layers
    layers = sorted(layer % n for layer in (*(int(layer) for _, layer in pairs), *config.spatial_target_layers))
    if len(set(layers)) < len(layers) or layers[:1] != [0]:
        raise ModelError(f"config.json adds images at the layers {layers}, which must start with 0 and be distinct")
    return layers


def _window_keys(config: Any) -> dict[str, Any]:
    """Return the keys of windows. Raises ModelError if layers have different frequencies, for which no key exists."""
    bases = getattr(config, "layer_rope_theta", None) or []
    if len(set(bases) - {0}) > 1:
        raise ModelError(
            f"config.json has layer_rope_theta = {quoted(bases)}: GGUF files have one base for all layers"
        )
    keys = window_keys(config) | {"rope.freq_base": max(bases, default=0) or config.rope_parameters["rope_theta"]}
    is_rotated = getattr(config, "no_rope_layers", None) or bases  # 0 for layers without rotation
    return keys | ({} if all(is_rotated) else {"attention.rope_pattern": [bool(value) for value in is_rotated]})


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if config.model_type == "granitemoehybrid":
        array = mamba_tensor(name, array, config)
    own_name = re.sub(r".*layers\.\d+\.|\.weight$", "", name)
    if config.model_type == "granitemoe_swa" and own_name in _SWA_EXPERTS:
        return {f"{_SWA_EXPERTS[own_name]}.weight": array}
    if "shared_mlp" not in name:
        return interleave_query_and_key(name, array, config)
    suffix = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if "output_linear" in name:
        return {f"ffn_down{suffix}.weight": array}
    gate, up = np.split(array, 2)
    return {f"ffn_gate{suffix}.weight": gate, f"ffn_up{suffix}.weight": up}


def record(m: Header) -> Graph:
    heads, experts = m.heads_by_layer(), m.experts()
    n_ff = 0 if experts else m.mlp_width()
    # Number of the embedding of images that is added before each layer, or -1.
    added = m.meta.read_each("deepstack_mapping", m.config.n_layers, int, -1, low=-1, high=1 << 10)
    deepstack = {i - 1: number for i, number in enumerate(added) if i and number > 0}
    net = None if all(heads) else Mamba.read(m.meta)
    windows = m.windows(period=0)
    is_rotated = m.meta.read_each("attention.rope_pattern", m.config.n_layers, bool, True, low=0, high=1)
    has_sinks = m.config.architecture == "granite_swa"
    dim = next((h.key_dim for h in heads if h), m.config.n_embd)
    scaling = "longrope" if "rope_factors_long.weight" in m.weights else None
    rope: Rope | None = make_rope(m, dim, interleaved=True, scaling=scaling)
    if not m.meta.read("rope.scaling.finetuned", bool, True):
        rope = None
    if rope is not None and m.config.architecture == "granitehybrid" and 2 * len(rope.frequencies) < dim:
        raise ModelError(
            f"granitehybrid.rope.dimension_count is {2 * len(rope.frequencies)}, but heads have {dim} values: "
            "llama.cpp's converter orders the rows of such a model (Bamba) as if whole heads were rotated, so its "
            "output would be wrong: localllm does not support this variant"
        )
    defaults = dict.fromkeys(("attention.scale", "residual_scale", "embedding_scale", "logit_scale"), 0.0)  # none
    if m.config.architecture == "minicpm":  # old files lack the keys
        defaults |= {"residual_scale": 1.4 / m.config.n_layers**0.5, "embedding_scale": 12.0}
        defaults |= {"logit_scale": m.config.n_embd / 256}
    scale, residual_scale, embedding_scale, logit_divisor = (
        m.meta.read(key, float, default, low=0.0, high=1e6) for key, default in defaults.items()
    )

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, own_heads = norm(at, "attn_norm", x), heads[at.number]
        if own_heads:
            own_rope, window = rope if is_rotated[at.number] else None, windows[at.number]
            y = attention(at, y, own_heads, own_rope, scale=scale or None, window=window, has_sinks=has_sinks)
        elif net:
            y = mamba(at, y, net)
        x = add(at, y, x, residual_scale or 1)
        y = norm(at, "ffn_norm", x)
        if experts:
            return mixture(at, y, experts, residual=x, residual_scale=residual_scale or 1)
        return add(at, gated_mlp(at, y, n_ff), x, residual_scale or 1)

    return decoder(
        m,
        layer,
        embedding_scale=embedding_scale or 1,
        logit_scale=1 / (logit_divisor or 1),
        deepstack=deepstack,
    )
