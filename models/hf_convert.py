"""Conversions of Hugging Face's keys and tensors that several architectures use: see `models.registry`.

``config`` is a `localllm.convert.config.Config`, with the values of ``config.json`` as attributes. Vectors are
float32. Matrices have the type of the checkpoint: rows and columns can be moved, and `floats` returns the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.models.config import MAX_HEAD_DIM

Array = NDArray[Any]

#: Names of activations in config.json.
SILU, GELU, GELU_TANH = (
    ("silu", "swish"),
    ("gelu", "gelu_python"),
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
)


def implied(names: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    """Return the ``values`` that a GGUF file implies for every setting in ``names``; an empty tuple accepts any."""
    return dict.fromkeys(names.split(), values)


#: Settings without a key in GGUF files, and the values that a GGUF file implies. An empty tuple accepts any value. An
#: architecture's ``HF_MEANT`` replaces single settings.
MEANT: dict[str, tuple[Any, ...]] = (
    implied("activation activation_function hidden_act hidden_activation mamba_hidden_act mlp_hidden_act", *SILU)
    | implied("moe_router_activation_func score_func score_function", "sigmoid")
    | implied("mamba_dt_limit time_step_limit", [0.0, math.inf])
    | implied("decoder_sparse_step full_attn_mod interpolate_factor moe_layer_freq num_expert_groups", 1)
    | implied("num_limited_groups", 1)
    | implied("attention_chunk_size attn_logit_softcapping final_logit_softcapping moe_layer_num_skipped", 0)
    | implied("shared_intermediate_size", 0)
    | implied("attn_output_gate block_use_swiglu mamba_inner_layernorms mamba_use_mlp mla_use_nope qk_norm", True)
    | implied("rope_interleave scale_attn_weights use_gated_activation use_parallel_block use_pos_enc", True)
    | implied("use_rotary_pos_emb", True)
    | implied(
        "add_cross_attention apply_residual_connection_post_layernorm causal norm_softmax parallel_block", False
    )
    | implied("position_embedding_xdrope post_norm prenorm qk_layer_norms rope_interleaved use_resampler", False)
    | implied("rotary_emb_interleaved scale_attn_by_inverse_layer_idx use_bidirectional_attention use_cla", False)
    | implied("use_rms_norm use_sliding_window", False)
    | {
        "layer_switch": (4,),
        "mlp_only_layers": ([],),
        "mlp_type": ("default",),
        "norm_type": ("layer_norm", "rms", "rmsnorm", "rms_norm"),
        "normalization_function": ("rmsnorm",),
        "offset_alibi": (100,),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("absolute", "rope", "rope_gptj", "nope"),
        "rotary_emb_fraction": (1.0,),
    }
    # derived from other settings, or from the shapes of tensors
    | implied("classifier_pooling clip_qkv expand is_decoder linear_num_heads mamba_expand max_window_layers")
    | implied("num_key_value_heads qk_head_dim use_qk_norm")
)


def floats(array: Array) -> NDArray[np.float32]:
    """Return an array as float32. A uint16 array contains the bits of bfloat16 values."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


# -- Tensors -------------------------------------------------------------------------------------------------------


def add_one_to_norms(name: str, array: Array, config: Any) -> Array:
    """Return weight + 1 for norms that multiply with 1 + weight (Gemma, Qwen 3.5 except its delta net's norm)."""
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return array + 1 if is_norm else array


def interleave_pairs(array: Array, n_heads: int) -> Array:
    """Reorder the rows [n_heads * head_dim] of each head from (0 … n/2 | n/2 … n) to (0, n/2, 1, n/2 + 1, …)."""
    halves = array.reshape(n_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def interleave_query_and_key(name: str, array: Array, config: Any) -> Array:
    """Reorder the rows of query and key to rotary pairs, as in the GGUF files of Llama and similar models."""
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return interleave_pairs(array, config.num_attention_heads)
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        return interleave_pairs(array, config.num_key_value_heads)
    return array


def split_heads(name: str, array: Array, config: Any) -> Array:
    """Reorder [query | key | value] of each head to the queries, keys and values of all heads."""
    if "query_key_value" not in name:
        return array
    heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def mamba_tensor(name: str, array: Array, config: Any) -> Array:
    """Convert Mamba 2's log decay to the decay's factor, and vectors of heads and groups to columns and rows."""
    if name.endswith(("A_log", ".D")):
        return (-np.exp(floats(array)) if name.endswith("A_log") else array)[:, None]
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return array.reshape(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    return array


def rope_factors(config: Any) -> Mapping[str, Array]:
    """Return the divisors of frequencies of Llama 3.1's scaling and of LongRoPE.

    Source: Meta's llama-models, ``apply_scaling``.
    """
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    kind = rope.peek("rope_type")
    if kind == "longrope":
        factors = {name: np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
        return {f"rope_factors_{name}.weight": values for name, values in factors.items()}
    if kind != "llama3":
        return {}
    rope.skip("rope_type")
    dim = getattr(config, "qk_rope_head_dim", None) or int(head_dim(config) * rope.get("partial_rotary_factor", 1))
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"{dim} values of a head are rotated")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    with np.errstate(all="ignore"):  # `models.rope` checks the factors
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        turns = rope["original_max_position_embeddings"] / wavelengths
        ramp = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)  # Llama 4 has no ramp
        return {"rope_freqs.weight": (1 / ((1 - ramp) / rope["factor"] + ramp)).astype(np.float32)}


def proportional_factors(config: Any, dim: int) -> dict[str, Array]:
    """Return the divisors of the frequencies in layers without a window: only the first frequencies rotate."""
    rope = config.rope_parameters["full_attention"]
    if rope["rope_type"] != "proportional":
        raise ModelError(f"config.json has rope_type = {quoted(rope['rope_type'])}, but GGUF files mean proportional")
    n_rotated = int(dim // 2 * rope.get("partial_rotary_factor", 1.0))
    return {"rope_freqs.weight": np.where(np.arange(dim // 2) < n_rotated, 1, 1e30).astype(np.float32)}


# -- Keys, without the architecture's name ---------------------------------------------------------------------------


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotated_part(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1))}


def unscaled(config: Any) -> dict[str, Any]:
    """Return the key that files of some architectures contain if the rotation is not scaled."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return {"rope.scaling.type": "none"} if rope.peek("rope_type") == "default" else {}


def is_classifier(config: Any) -> bool:
    """Return whether an encoder is a classifier or reranker, not an embedding model."""
    return any(name.endswith("ForSequenceClassification") for name in getattr(config, "architectures", None) or ())


def encoder_keys(config: Any) -> dict[str, Any]:
    """Return the keys of BERT and similar models. As in llama.cpp's converter, some of the usual keys are omitted."""
    left_out = "head_count_kv key_length value_length layer_norm_rms_epsilon"
    keys: dict[str, Any] = {"attention.causal": False} | {f"attention.{name}": None for name in left_out.split()}
    if is_classifier(config):
        by_number = getattr(config, "id2label", None) or {}
        labels = [label for _, label in sorted(by_number.items(), key=lambda item: int(item[0]))]
        pooling = {"mean": 1, "cls": 2}.get(getattr(config, "classifier_pooling", ""))
        keys |= {"pooling_type": 4, "classifier.pooling_type": pooling, "classifier.output_labels": labels or None}
    return keys


def sliding_window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": getattr(config, "sliding_window", None)}


def gemma_keys(config: Any) -> dict[str, Any]:
    """Check the scale of scores of Gemma 2 and 3, for which files have no key. Return no keys."""
    n, is_27b = head_dim(config), config.num_hidden_layers in (46, 62)
    expected = config.hidden_size / config.num_attention_heads if is_27b else n
    scalar = getattr(config, "query_pre_attn_scalar", expected)
    if scalar != expected:
        raise ModelError(
            f"config.json has query_pre_attn_scalar = {quoted(scalar)}, but GGUF files mean {expected:g}"
        )
    return {}


def window_pattern(config: Any) -> list[bool]:
    """Return whether each layer has a window."""
    return [kind == "sliding_attention" for kind in config.layer_types]


def window_keys(config: Any) -> dict[str, Any]:
    if not getattr(config, "sliding_window", None):
        return {}
    return sliding_window(config) | {"attention.sliding_window_pattern": window_pattern(config)}


def periodic_windows(config: Any, period: int) -> dict[str, Any]:
    """Return the keys of windows. The pattern is omitted if it is the usual one.

    In the usual pattern, the last layer of each ``period`` layers has no window.
    """
    pattern = window_pattern(config)
    is_usual = pattern == [(i + 1) % period != 0 for i in range(len(pattern))]
    return sliding_window(config) if is_usual else window_keys(config)


def expert_norm(config: Any, usual: bool) -> dict[str, Any]:
    """Return the key for the division of experts' weights by their sum, if the setting is not the usual one."""
    norm = bool(getattr(config, "norm_topk_prob", usual))
    return {} if norm == usual else {"expert_weights_norm": norm}


def n_dense_layers(config: Any) -> int:
    """Return the number of layers with an MLP. All layers after them have experts."""
    kinds, n = getattr(config, "mlp_layer_types", None), getattr(config, "first_k_dense_replace", None)
    if not kinds:
        return int(n or 0)
    n = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if "dense" in kinds[n:]:
        raise ModelError("config.json has an MLP layer after a layer with experts, which GGUF files cannot describe")
    return n


def routing_keys(config: Any) -> dict[str, Any]:
    """Return the keys of experts in DeepSeek's models."""
    is_softmax, method = config.model_type == "deepseek_v2", getattr(config, "topk_method", None)
    usual = {"deepseek_v2": "softmax", "deepseek_v4": "sqrtsoftplus"}.get(config.model_type, "sigmoid")
    scoring = getattr(config, "scoring_func", None) or usual
    scoring = usual if scoring == method == "noaux_tc" else scoring  # as in dots.llm1
    if scoring != usual or method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        raise ModelError(
            f"config.json has scoring_func = {quoted(scoring)} and topk_method = {quoted(method)}, which "
            "localllm does not convert together"
        )
    if is_softmax and config.norm_topk_prob:
        raise ModelError(
            "config.json has norm_topk_prob, which transformers ignores for DeepSeek V2: set it to false"
        )
    has_groups = not is_softmax or method == "group_limited_greedy"
    return {
        "expert_count": config.n_routed_experts,
        "leading_dense_block_count": n_dense_layers(config),
        "expert_shared_count": getattr(config, "n_shared_experts", None),
        "expert_gating_func": 1 if is_softmax else 2,
        "expert_weights_norm": None if is_softmax else bool(config.norm_topk_prob),
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": getattr(config, "n_group", None) if has_groups else None,
        "expert_group_used_count": getattr(config, "topk_group", None) if has_groups else None,
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
    """Return the key for the number of frequencies per axis of an image. In text, all axes are the position."""
    sections = config.rope_parameters.get("mrope_section")
    return {"rope.dimension_sections": (list(sections) + [0] * 4)[:4]} if sections else {}


def attention_layers(config: Any, value: int) -> list[int]:
    """Return a list with ``value`` for layers with attention and 0 for other layers."""
    return [value if kind in ("full_attention", "attention") else 0 for kind in config.layer_types]


def parallel_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | {
        "use_parallel_residual": getattr(config, "use_parallel_residual", None),
        "attention.key_length": None,
        "attention.value_length": None,
    }
