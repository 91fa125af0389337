"""Qwen 3, dense and with a mixture of experts in every layer (arXiv:2505.09388): each head of query and key is normed
before it is rotated."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models.blocks import decoder, llama_layer
from localllm.models.config import Header
from localllm.models.hf_convert import Array, axes_keys, expert_norm
from localllm.models.rope import make_rope, with_axes


def hf_keys(config: Any) -> dict[str, Any]:
    norm = expert_norm(config, usual=True) if "num_experts" in config else {}
    if "vl" not in config.model_type and "omni" not in config.model_type:
        return norm
    if norm:
        raise ModelError("config.json has norm_topk_prob = false, but GGUF files of Qwen 3 VL mean true")
    vision = config.get("vision_config") or {}
    return norm | axes_keys(config) | {"n_deepstack_layers": len(vision.get("deepstack_visual_indexes", ()))}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Transpose Qwen 3 VL's matrices of experts, which are [inputs, outputs]."""
    if "vl" not in config.model_type or array.ndim != 3:
        return array
    n_in = config.hidden_size if "gate_up" in name else config.moe_intermediate_size
    return array.swapaxes(1, 2) if array.shape[1] == n_in else array


def record(m: Header) -> Graph:
    rope, windows = with_axes(m, make_rope(m, m.heads().key_dim), in_turn=True), m.windows(period=0)
    layer = llama_layer(m, rope, m.experts(), windows=windows, qk_norm="head")
    n = m.meta.read("n_deepstack_layers", int, 0, low=0, high=1 << 10)
    return decoder(m, layer, deepstack={i: i + 1 for i in range(n)})
