"""Conversions of Hugging Face's keys and tensors that architectures share: see `models.registry`.

``config`` is a `localllm.convert.config.Config`: the values of ``config.json`` as attributes.  Arrays are vectors in
float32, and matrices as they are stored: to be moved about, or to be computed with as `floats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.models.config import MAX_HEAD_DIM

Array = NDArray[Any]


def floats(array: Array) -> NDArray[np.float32]:
    """A matrix's values: bfloat16 comes as the uint16 that it is stored in."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


# -- Tensors -------------------------------------------------------------------------------------------------------


def add_one_to_norms(name: str, array: Array, config: Any) -> Array:
    """Gemma's and Qwen 3.5's norms multiply with 1 + weight, but not the delta net's own."""
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return array + 1 if is_norm else array


def interleave_pairs(array: Array, n_heads: int) -> Array:
    """Reorders the rows [n_heads * head_dim] of each head from (0 … n/2 | n/2 … n) to (0, n/2, 1, n/2 + 1, …)."""
    halves = array.reshape(n_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def interleave_query_and_key(name: str, array: Array, config: Any) -> Array:
    """Rows of query and key in the order of rotary pairs, as files of Llama's kin have them."""
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return interleave_pairs(array, config.num_attention_heads)
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        return interleave_pairs(array, config.num_key_value_heads)
    return array


def mamba_tensor(name: str, array: Array, config: Any) -> Array:
    """Mamba 2's decay as it is multiplied with, and vectors of heads and groups as columns and rows."""
    if name.endswith(("A_log", ".D")):
        return (-np.exp(floats(array)) if name.endswith("A_log") else array)[:, None]
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return array.reshape(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    return array


def llama3_factors(config: Any) -> Mapping[str, Array]:
    """The divisors of frequencies of Llama 3.1 and models that scale so (Meta's llama-models, ``apply_scaling``)."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope.get("rope_type") != "llama3":
        return {}
    dim = getattr(config, "qk_rope_head_dim", None) or int(head_dim(config) * rope.get("partial_rotary_factor", 1))
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"{dim} values of a head are rotated")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    with np.errstate(all="ignore"):  # whoever reads the factors checks them
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        turns = rope["original_max_position_embeddings"] / wavelengths
        kept = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)  # Llama 4 has no ramp
        return {"rope_freqs.weight": (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)}


def proportional_factors(config: Any, dim: int) -> dict[str, Array]:
    """Of layers without a window: all but the first frequencies do not turn, and count where others are computed."""
    n_rotated = int(dim // 2 * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": np.where(np.arange(dim // 2) < n_rotated, 1, 1e30).astype(np.float32)}


# -- Keys, without the architecture's name ---------------------------------------------------------------------------


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotated_part(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1))}


def is_classifier(config: Any) -> bool:
    """Whether an encoder scores a text, or a query and a document, rather than making a vector of it."""
    return any(name.endswith("ForSequenceClassification") for name in getattr(config, "architectures", None) or ())


def encoder_keys(config: Any) -> dict[str, Any]:
    """Those of BERT's kin, which llama.cpp's converter writes fewer for."""
    left_out = "head_count_kv key_length value_length layer_norm_rms_epsilon"
    keys: dict[str, Any] = {"attention.causal": False} | {f"attention.{name}": None for name in left_out.split()}
    if is_classifier(config):
        by_number = getattr(config, "id2label", None) or {}  # "10" is behind "2"
        labels = [by_number[number] for number in sorted(by_number, key=lambda number: (len(number), number))]
        pooling = {"mean": 1, "cls": 2}.get(getattr(config, "classifier_pooling", ""))
        keys |= {"pooling_type": 4, "classifier.pooling_type": pooling, "classifier.output_labels": labels or None}
    return keys


def sliding_window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": getattr(config, "sliding_window", None)}


def gemma_keys(config: Any) -> dict[str, Any]:
    """Of Gemma 2 and 3, whose files have no key for the scale of scores."""
    n, is_27b = head_dim(config), config.num_hidden_layers in (46, 62)
    expected = config.hidden_size / config.num_attention_heads if is_27b else n
    scalar = getattr(config, "query_pre_attn_scalar", expected)
    if scalar != expected:
        raise ModelError(
            f"config.json has query_pre_attn_scalar = {quoted(scalar)}, but GGUF files mean {expected:g}"
        )
    return sliding_window(config)


def window_pattern(config: Any) -> list[bool]:
    """Of each layer, whether it has a window; old configurations say only how often one has none."""
    if kinds := getattr(config, "layer_types", None):
        return [kind == "sliding_attention" for kind in kinds]
    return [(i + 1) % config.sliding_window_pattern != 0 for i in range(config.num_hidden_layers)]


def window_keys(config: Any) -> dict[str, Any]:
    if not getattr(config, "sliding_window", None):
        return {}
    return sliding_window(config) | {"attention.sliding_window_pattern": window_pattern(config)}


def routing_keys(config: Any) -> dict[str, Any]:
    """Experts as DeepSeek has them."""
    return {
        "expert_count": config.n_routed_experts,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", None),
        "expert_shared_count": getattr(config, "n_shared_experts", None),
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
        "expert_weights_norm": bool(config.norm_topk_prob) or (None if config.model_type == "deepseek_v2" else False),
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": getattr(config, "n_group", None),
        "expert_group_used_count": getattr(config, "topk_group", None),
    }


def mamba_keys(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }


def axes_keys(config: Any) -> dict[str, Any]:
    """How many frequencies turn by each axis of a picture; for text, all axes are the position."""
    sections = config.rope_parameters.get("mrope_section")
    return {"rope.dimension_sections": (list(sections) + [0] * 4)[:4]} if sections else {}


def attention_layers(config: Any, value: int) -> list[int]:
    """``value`` in layers with attention, 0 in others."""
    return [value if kind in ("full_attention", "attention") else 0 for kind in config.layer_types]


def parallel_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | {
        "use_parallel_residual": getattr(config, "use_parallel_residual", None),
        "attention.key_length": None,
        "attention.value_length": None,
    }
