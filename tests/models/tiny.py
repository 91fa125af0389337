"""Tiny random models of transformers, written as GGUF files with the names and keys that llama.cpp's converter has.

To test one more architecture, add an entry to `TINY`: transformers' configuration, and what the file has beyond what
`general_keys` and the architecture's ``HF_NAMES`` give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.models.registry import ARCHITECTURES
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models

Array = NDArray[np.float32]
#: Of a tensor's name in a checkpoint, itself and the configuration: what the file has instead.
Change = Callable[[str, Array, Any], Array | dict[str, Array]]


def unchanged(name: str, array: Array, config: Any) -> Array:
    return array


def no_keys(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Tiny:
    """An entry: a configuration of transformers, and how a file of it is written.

    Attributes:
        model_type: transformers' name of the architecture.
        architecture: GGUF's.
        config: what differs from `CONFIG`.
        keys: further keys, without the architecture's name.
        change: what llama.cpp's converter does to a tensor; or several of GGUF's names that it makes of one.
        extra: tensors that are not in a checkpoint.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], Mapping[str, Any]] = no_keys
    change: Change = unchanged
    extra: Mapping[str, Callable[[Any], Array]] = field(default_factory=dict)


#: Heads in two groups, a width that is no multiple of a block or tile, and few tokens.
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


# -- What converters do --------------------------------------------------------------------------------------------


def add_one_to_norms(name: str, array: Array, config: Any) -> Array:
    """Gemma's and Qwen 3.5's norms multiply with 1 + weight, but not the delta net's own."""
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return array + 1 if is_norm else array


def delta_net_tensors(name: str, array: Array, config: Any) -> Array:
    if name.endswith("A_log"):
        return -np.exp(array)
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    return add_one_to_norms(name, array, config)


def tiled_value_heads(name: str, array: Array, config: Any) -> Array:
    """Value heads of one key head, which are neighbours in transformers, come in turns in files of Qwen 3.5."""
    array = delta_net_tensors(name, array, config)
    if "linear_attn." not in name or name.endswith(".norm.weight"):
        return array
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("out_proj.weight"):
        return _tiled(array.T, n_keys, n_values).T
    keys = 2 * n_keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    return np.concatenate([array[:keys], _tiled(array[keys:], n_keys, n_values)])


def _tiled(array: Array, n_keys: int, n_values: int) -> Array:
    """Rows of heads, which are n_keys groups of neighbours, taken from each group in turn."""
    heads = array.reshape(n_keys, n_values // n_keys, -1, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def delta_net_keys(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }


def window_keys(config: Any) -> dict[str, Any]:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": pattern}


def separate_qkvz(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Qwen 3 Next has [query | key | values | gates] of each key head in one matrix."""
    if not name.endswith("in_proj_qkvz.weight"):
        return delta_net_tensors(name, array, config)
    n_keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // n_keys * config.linear_value_head_dim
    heads = array.reshape(n_keys, -1, array.shape[-1])
    q, k, v, z = (
        part.reshape(-1, array.shape[-1]) for part in np.split(heads, np.cumsum([dim, dim, values]), axis=1)
    )
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}


def interleave_pairs(name: str, array: Array, config: Any) -> Array:
    """Rows of query and key in the order of rotary pairs, as files of Llama's kin have them."""
    if name.endswith("q_proj.weight"):
        return tiny_models.interleave_pairs(array, config.num_attention_heads)
    return (
        tiny_models.interleave_pairs(array, config.num_key_value_heads) if name.endswith("k_proj.weight") else array
    )


def gpt_oss_experts(name: str, array: Array, config: Any) -> Array:
    """Matrices [inputs, outputs], in which gate and up take turns."""
    if "experts." not in name:
        return array
    array = array if name.endswith("bias") else array.swapaxes(1, 2)
    return np.concatenate([array[:, ::2], array[:, 1::2]], axis=1) if "gate_up" in name else array


def granite_tensors(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if "shared_mlp.input_linear" not in name:
        return interleave_pairs(name, array, config)
    return dict(zip(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), np.split(array, 2), strict=True))


def granite_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    }


def sliding_window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def rotated_part(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"])}


def mistral3_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
    }


def softcaps(config: Any) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: getattr(config, name, None) for name in names} | sliding_window(config)


def longrope_factors(config: Any, kind: str) -> Array:
    return np.array(config.rope_parameters[f"{kind}_factor"], np.float32)


def phi3_keys(config: Any) -> dict[str, Any]:
    """Its files have no key for the kind of scaling."""
    width = config.hidden_size // config.num_attention_heads
    keys = {
        "rope.dimension_count": int(width * config.rope_parameters.get("partial_rotary_factor", 1)),
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.scaling.type": None,
    }
    scale = config.max_position_embeddings / config.original_max_position_embeddings
    if "long_factor" in config.rope_parameters:
        keys["rope.scaling.attn_factor"] = (
            1 + np.log(scale) / np.log(config.original_max_position_embeddings)
        ) ** 0.5
    return keys | sliding_window(config)


def gemma4_keys(config: Any) -> dict[str, Any]:
    full = config.per_layer_config[config.layer_types.index("full_attention")]
    n, n_shared = config.num_hidden_layers, config.num_kv_shared_layers
    keys = {
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [config.per_layer_config[i].num_key_value_heads for i in range(n)],
        "attention.shared_kv_layers": n_shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "expert_used_count": config.top_k_experts,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [config.intermediate_size * (1 + (i >= n - n_shared)) for i in range(n)]
    return keys | window_keys(config)


def gemma4_factors(config: Any) -> Array:
    """What keeps all but the first frequencies of the layers without a window from turning."""
    full = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    n_rotated = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return np.where(np.arange(full) < n_rotated, 1, 1e30).astype(np.float32)


def split_latents(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Of each head, what brings its query into the space of latents, and out of it."""
    if not name.endswith("kv_b_proj.weight"):
        return array
    heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"attn_k_b.weight": k.swapaxes(1, 2), "attn_v_b.weight": v}


def latent_keys(config: Any) -> dict[str, Any]:
    """As if there was one head of keys."""
    return old_latent_keys(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_head_dim,
        "attention.value_length_mla": config.v_head_dim,
    }


def old_latent_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_head_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * getattr(config, "rope_parameters", {}).get("mscale_all_dim", 0),
        "expert_count": config.n_routed_experts,
        "leading_dense_block_count": 1,
    } | routing_keys(config)


def routing_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_shared_count": config.n_shared_experts,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def mamba_tensors(name: str, array: Array, config: Any) -> Array:
    if name.endswith(("A_log", ".D")):
        return (-np.exp(array) if name.endswith("A_log") else array)[:, None]
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    is_norm = name.endswith(("mixer.norm.weight", "mamba.norm.weight"))
    return array.reshape(n_mamba_groups(config), -1) if is_norm else array


def n_mamba_groups(config: Any) -> int:
    groups: int = getattr(config, "n_groups", None) or config.mamba_n_groups
    return groups


def nemotron_keys(config: Any) -> dict[str, Any]:
    def of(kind: str, value: int) -> list[int]:
        return [value if kind in each else 0 for each in config.layers_block_type]

    is_mixture = "moe" in config.layers_block_type
    keys = {
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": of("full_attention", config.num_key_value_heads),
        "feed_forward_length": of("moe", config.moe_intermediate_size)
        if is_mixture
        else of("mlp", config.intermediate_size),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if not is_mixture:
        return keys | dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"))
    shared = {"expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size}
    return keys | routing_keys(config) | shared | {"moe_latent_size": config.moe_latent_size}


def mamba_keys(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }


def mamba2_keys(config: Any) -> dict[str, Any]:
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    return dict.fromkeys(absent) | {
        "attention.head_count": 0,
        "feed_forward_length": 0,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.num_heads,
        "ssm.inner_size": config.num_heads * config.head_dim,
    }


#: And those of lists: by them, the converter multiplies matrices.
FALCON_MULTIPLIERS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


def kimi_keys(config: Any) -> dict[str, Any]:
    keys = latent_keys(config) | {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_count": config.num_experts,
        "attention.value_length": None,
        "rope.scaling.yarn_log_multiplier": None,
    }
    return {key: value for key, value in keys.items() if "group" not in key}


def kimi_tensors(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name.endswith("A_log"):
        return -np.exp(array)
    if name.endswith("conv1d.weight"):
        return array.reshape(1, -1, 1, array.shape[-1])
    match = re.fullmatch(r"model\.layers\.\d+\.block_sparse_moe\.(gate|up|down)_proj\.weight", name)
    return {f"ffn_{match[1]}.weight": array} if match else split_latents(name, array, config)


def falcon_tensors(name: str, array: Array, config: Any) -> Array:
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    parts = [inner, inner, states, states, config.mamba_n_heads]
    factors = {
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "q_proj.weight": config.attention_in_multiplier,
        "k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "in_proj.weight": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, parts)[:, None],
        "out_proj.weight": config.ssm_out_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    factor = next((factor for end, factor in factors.items() if name.endswith(end)), 1)
    return (mamba_tensors(name, array, config) * factor).astype(np.float32)


def parallel_keys(config: Any) -> dict[str, Any]:
    is_parallel = getattr(config, "use_parallel_residual", None)
    return rotated_part(config) | {
        "use_parallel_residual": is_parallel,
        "attention.key_length": None,
        "attention.value_length": None,
    }


def split_neox_heads(name: str, array: Array, config: Any) -> Array:
    """[query | key | value] of each head as those of all heads."""
    if "query_key_value" not in name:
        return array
    heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def granite_hybrid_keys(config: Any) -> dict[str, Any]:
    n_kv = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    keys = {"attention.head_count_kv": n_kv, "rope.scaling.finetuned": False}
    return granite_keys(config) | mamba_keys(config) | keys


def granite_hybrid_tensors(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    changed = granite_tensors(name, mamba_tensors(name, array, config), config)
    if config.num_local_experts or "shared_mlp" not in name:
        return changed
    if isinstance(changed, dict):
        return {ours.replace("_shexp", ""): part for ours, part in changed.items()}
    return {"ffn_down.weight": changed}


def lfm2_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "shortconv.l_cache": config.conv_L_cache,
        "leading_dense_block_count": getattr(config, "num_dense_layers", None),
        "expert_gating_func": 2 if hasattr(config, "num_dense_layers") else None,
    }


def lfm2_tensors(name: str, array: Array, config: Any) -> Array:
    return array.squeeze(1) if name.endswith("conv.conv.weight") else array


def llama4_keys(config: Any) -> dict[str, Any]:
    return {
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.chunk_size": config.attention_chunk_size,
        "attention.temperature_scale": config.attn_scale,
        "attention.temperature_length": config.floor_scale,
    }


def llama4_tensors(name: str, array: Array, config: Any) -> Array:
    return array.swapaxes(1, 2) if "experts." in name else array


def cohere_keys(config: Any) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, "attention.key_length": None, "attention.value_length": None}


def ernie_moe_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
    }


def hunyuan_moe_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_used_count": config.moe_topk[0],
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5},
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LOCAL_MIXTURE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
SHARED_EXPERT = {"shared_expert_intermediate_size": 80}
WINDOW = {"sliding_window": 7}
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0}

HALF_ROTATED = {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 1.5,
}
NEMOTRON_MOE = NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
}
GRANITE_HYBRID = GRANITE | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
}
LFM2 = {
    "tie_word_embeddings": True,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "rope_parameters": PLAIN_ROPE,
}
LLAMA4 = LOCAL_MIXTURE | {
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 172,
    "num_hidden_layers": 8,
}
STABLELM = HALF_ROTATED | {"rms_norm_eps": None}
NEOX = STABLELM | {"num_key_value_heads": 4}
COHERE = {"rms_norm_eps": None, "tie_word_embeddings": True, "logit_scale": 0.3, "rope_parameters": PLAIN_ROPE}
LATENTS = {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
GEMMA4 = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": PLAIN_ROPE,
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100_000.0},
    },
}

TINY: dict[str, Tiny] = {
    "cohere2": Tiny("cohere2", "cohere2", WINDOW | COHERE, lambda config: window_keys(config) | cohere_keys(config)),
    "command-r": Tiny("cohere", "command-r", COHERE, cohere_keys),
    "deepseek-v2": Tiny(
        "deepseek_v2",
        "deepseek2",
        LATENTS | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
        latent_keys,
        split_latents,
    ),
    "deepseek-v3": Tiny(
        "deepseek_v3",
        "deepseek2",
        LATENTS | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
        latent_keys,
        split_latents,
    ),
    "deepseek-v3-old": Tiny("deepseek_v3", "deepseek2", LATENTS, old_latent_keys),
    "glm-4.7-flash": Tiny(
        "glm4_moe_lite", "deepseek2", LATENTS | {"n_group": 1, "topk_group": 1}, latent_keys, split_latents
    ),
    "ernie4_5": Tiny("ernie4_5", "ernie4_5", {"tie_word_embeddings": True}),
    "ernie4_5-moe": Tiny(
        "ernie4_5_moe",
        "ernie4_5-moe",
        {
            "intermediate_size": 192,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
        },
        ernie_moe_keys,
        lambda name, array, config: array[0] if name.endswith("correction_bias") else array,
    ),
    "exaone4": Tiny("exaone4", "exaone4", WINDOW | {"sliding_window_pattern": 4}, window_keys),
    "falcon-h1": Tiny(
        "falcon_h1",
        "falcon-h1",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
            "mlp_multipliers": [0.8, 0.7],
        }
        | dict.fromkeys(FALCON_MULTIPLIERS, 0.9),
        lambda config: mamba_keys(config) | {"ssm.inner_size": config.mamba_d_ssm},
        falcon_tensors,
    ),
    "gemma": Tiny("gemma", "gemma", {"tie_word_embeddings": True}, change=add_one_to_norms),
    "gemma2": Tiny(
        "gemma2",
        "gemma2",
        WINDOW | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
        softcaps,
        add_one_to_norms,
    ),
    "gemma3": Tiny(
        "gemma3_text",
        "gemma3",
        WINDOW
        | {"num_hidden_layers": 7, "tie_word_embeddings": True, "query_pre_attn_scalar": 16}
        | {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": LINEAR}},
        sliding_window,
        add_one_to_norms,
    ),
    "gemma4-dense": Tiny(
        "gemma4_text",
        "gemma4",
        WINDOW | GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        gemma4_keys,
        extra={"rope_freqs.weight": gemma4_factors},
    ),
    "gemma4-e2b": Tiny(
        "gemma4_text",
        "gemma4",
        WINDOW | GEMMA4 | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 4, "use_double_wide_mlp": True},
        gemma4_keys,
        extra={"rope_freqs.weight": gemma4_factors},
    ),
    "gemma4-moe": Tiny(
        "gemma4_text",
        "gemma4",
        WINDOW
        | GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48},
        gemma4_keys,
        extra={"rope_freqs.weight": gemma4_factors},
    ),
    "glm4": Tiny(
        "glm4",
        "glm4",
        {"attention_bias": True, "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}},
        rotated_part,
    ),
    "glm4moe": Tiny(
        "glm4_moe",
        "glm4moe",
        LATENTS | HALF_ROTATED | {"num_key_value_heads": 2, "use_qk_norm": True, "n_group": 1, "topk_group": 1},
        lambda config: rotated_part(config) | routing_keys(config) | {"leading_dense_block_count": 1},
    ),
    "gpt-oss": Tiny(
        "gpt_oss",
        "gpt-oss",
        WINDOW | LOCAL_MIXTURE | {"rope_parameters": YARN | {"truncate": False}},
        lambda config: sliding_window(config) | {"expert_feed_forward_length": config.intermediate_size},
        gpt_oss_experts,
    ),
    "gptneox": Tiny("gpt_neox", "gptneox", NEOX, parallel_keys, split_neox_heads),
    "gptneox-serial": Tiny(
        "gpt_neox", "gptneox", NEOX | {"use_parallel_residual": False}, parallel_keys, split_neox_heads
    ),
    "gpt2": Tiny(
        "gpt2",
        "gpt2",
        {"intermediate_size": 256, "num_key_value_heads": 4, "rms_norm_eps": None, "tie_word_embeddings": True},
        lambda config: {
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.freq_base": None,
        },
        lambda name, array, config: array.T if re.search(r"c_\w+\.weight", name) else array,
    ),
    "granite": Tiny("granite", "granite", GRANITE, granite_keys, granite_tensors),
    "granitemoe": Tiny("granitemoe", "granitemoe", GRANITE | LOCAL_MIXTURE, granite_keys, granite_tensors),
    "granitemoe-shared": Tiny(
        "granitemoeshared",
        "granitemoe",
        GRANITE | LOCAL_MIXTURE | {"shared_intermediate_size": 80},
        granite_keys,
        granite_tensors,
    ),
    "granitehybrid": Tiny(
        "granitemoehybrid",
        "granitehybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 172},
        lambda config: granite_hybrid_keys(config) | {"expert_shared_feed_forward_length": None},
        granite_hybrid_tensors,
    ),
    "granitehybrid-moe": Tiny(
        "granitemoehybrid",
        "granitehybrid",
        GRANITE_HYBRID | LOCAL_MIXTURE | {"shared_intermediate_size": 80},
        granite_hybrid_keys,
        granite_hybrid_tensors,
    ),
    "hunyuan-dense": Tiny("hunyuan_v1_dense", "hunyuan-dense"),
    "hunyuan-moe": Tiny(
        "hunyuan_v1_moe",
        "hunyuan-moe",
        {"num_experts": 6, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [172] * 4},
        hunyuan_moe_keys,
    ),
    "kimi-linear": Tiny(
        "kimi_linear",
        "kimi-linear",
        LATENTS
        | MIXTURE
        | {"q_lora_rank": None, "num_experts": 8, "n_group": 1, "topk_group": 1}
        | {"linear_head_dim": 16, "linear_num_heads": 4, "num_hidden_layers": 5},
        kimi_keys,
        kimi_tensors,
    ),
    "lfm2": Tiny("lfm2", "lfm2", LFM2, lfm2_keys, lfm2_tensors),
    "lfm2moe": Tiny("lfm2_moe", "lfm2moe", LFM2 | MIXTURE | {"num_dense_layers": 1}, lfm2_keys, lfm2_tensors),
    "llama4": Tiny(
        "llama4_text",
        "llama4",
        LLAMA4 | {"attention_chunk_size": 7, "floor_scale": 5},
        llama4_keys,
        llama4_tensors,
    ),
    "llama4-defaults": Tiny("llama4_text", "llama4", LLAMA4, llama4_keys, llama4_tensors),
    "mamba2": Tiny(
        "mamba2",
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
        mamba2_keys,
        mamba_tensors,
    ),
    "minimax-m2": Tiny(
        "minimax_m2",
        "minimax-m2",
        LOCAL_MIXTURE | HALF_ROTATED,
        lambda config: (
            rotated_part(config) | {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}
        ),
    ),
    "mistral3": Tiny(
        "ministral3",
        "mistral3",
        {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"llama_4_scaling_beta": 0.3}
        },
        mistral3_keys,
        interleave_pairs,
    ),
    "nemotron-h": Tiny("nemotron_h", "nemotron_h", NEMOTRON, nemotron_keys, mamba_tensors),
    "nemotron-h-moe": Tiny("nemotron_h", "nemotron_h_moe", NEMOTRON_MOE, nemotron_keys, mamba_tensors),
    "nemotron-h-latent": Tiny(
        "nemotron_h", "nemotron_h_moe", NEMOTRON_MOE | {"moe_latent_size": 32}, nemotron_keys, mamba_tensors
    ),
    "olmo2": Tiny("olmo2", "olmo2"),
    "olmo3": Tiny(
        "olmo3",
        "olmo2",
        WINDOW | {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": YARN}},
        window_keys,
    ),
    "phi2": Tiny("phi", "phi2", NEOX | {"intermediate_size": 256}, parallel_keys),
    "phi3": Tiny("phi3", "phi3", WINDOW | {"original_max_position_embeddings": 128}, phi3_keys),
    "phi3-longrope": Tiny(
        "phi3",
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 16,
            "rope_parameters": PLAIN_ROPE
            | {"rope_type": "longrope", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16}
            | {"long_factor": [1.5, 2.0, 3.0, 5.0, 7.0, 8.0], "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]},
        },
        phi3_keys,
        extra={f"rope_factors_{kind}.weight": partial(longrope_factors, kind=kind) for kind in ("long", "short")},
    ),
    "qwen2moe": Tiny("qwen2_moe", "qwen2moe", MIXTURE | SHARED_EXPERT | {"norm_topk_prob": False}),
    "qwen3": Tiny("qwen3", "qwen3"),
    "qwen3moe": Tiny("qwen3_moe", "qwen3moe", MIXTURE),
    "qwen3next": Tiny("qwen3_next", "qwen3next", DELTA_NET | MIXTURE | SHARED_EXPERT, delta_net_keys, separate_qkvz),
    "qwen35": Tiny(
        "qwen3_5_text", "qwen35", DELTA_NET, lambda config: delta_net_keys(config) | SECTIONS, tiled_value_heads
    ),
    "qwen35moe": Tiny(
        "qwen3_5_moe_text",
        "qwen35moe",
        DELTA_NET | MIXTURE | SHARED_EXPERT,
        lambda config: delta_net_keys(config) | SECTIONS,
        tiled_value_heads,
    ),
    "seed-oss": Tiny("seed_oss", "seed_oss", {"attention_bias": True}),
    "smollm3": Tiny("smollm3", "smollm3", change=interleave_pairs),
    "stablelm": Tiny("stablelm", "stablelm", STABLELM, parallel_keys),
    "stablelm-parallel": Tiny(
        "stablelm", "stablelm", STABLELM | {"use_parallel_residual": True, "use_qkv_bias": True}, parallel_keys
    ),
    "starcoder2": Tiny(
        "starcoder2",
        "starcoder2",
        {"tie_word_embeddings": True, "rms_norm_eps": None},
        lambda config: {"attention.layer_norm_epsilon": config.norm_epsilon},
    ),
}


# -- Making and writing --------------------------------------------------------------------------------------------


def make_model(entry: Tiny, seed: int = 0) -> Any:
    """A random model of transformers: matrices as large as keeps activations near 1, and nothing at its default."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(entry.model_type, **(CONFIG | dict(entry.config)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    model.config.allow_global_per_layer_attribute_access = True  # Gemma 4's, whose layers' heads differ
    rng = np.random.default_rng(seed)
    is_shifted = entry.change("model.norm.weight", np.zeros(1, np.float32), config).item() == 1
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            shifted = is_shifted and not name.endswith("linear_attn.norm.weight")
            parameter.copy_(torch.from_numpy(_random(rng, name, tuple(parameter.shape), shifted).astype(np.float32)))
    return model


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], shifted: bool) -> Array:
    """``shifted``: norms multiply with 1 + weight."""
    if "embed_tokens" in name:
        return rng.normal(0, 1, shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return rng.uniform(0.2, 0.8, shape) - shifted  # so that scores stay small where their scale is 1
    if re.search(r"norm[\w.]*weight$", name):
        return rng.uniform(0.5, 1.5, shape) - shifted
    if name.endswith(("scalar", "scale")):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.2, 2, shape))
    if name.endswith((".gate.weight", "router.weight")):
        return rng.normal(0, 5 * shape[-1] ** -0.5, shape)  # so large that no choice is a close call
    if len(shape) == 1 or "bias" in name or "sinks" in name:
        return rng.normal(0, 0.2, shape)
    return rng.normal(0, shape[-1] ** -0.5, shape)


def write(path: Path, entry: Tiny, model: Any, type: GGMLType = GGMLType.F32) -> Path:
    """Writes a model of transformers as llama.cpp's converter would."""
    config, tensors = model.config, dict[str, Array]()
    for name, array in checkpoint(model, path.with_suffix(".hf")).items():
        tensors |= named(entry, name, entry.change(name, array, config))
    tensors |= {name: make(config) for name, make in entry.extra.items()}
    keys = general_keys(config) | dict(entry.keys(config))
    encoded = {name: tiny_models.encode(np.ascontiguousarray(array), type) for name, array in tensors.items()}
    metadata = {f"{entry.architecture}.{key}": value for key, value in keys.items()}
    return tiny_models.write_file(
        path, entry.architecture, metadata | tiny_models.spm_vocabulary(config.vocab_size), encoded
    )


def checkpoint(model: Any, folder: Path) -> dict[str, Array]:
    """The tensors of a model as transformers saves them; those of experts stacked."""
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    tensors: dict[str, Array] = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        if re.search(r"\.experts\.0\.", name):
            numbers = range(sum(re.sub(r"\.experts\.\d+\.", ".experts.0.", other) == name for other in tensors))
            parts = [tensors.pop(name.replace(".experts.0.", f".experts.{i}.")) for i in numbers]
            tensors[name.replace(".experts.0.", ".experts.*.")] = np.stack(parts)
    return tensors


def named(entry: Tiny, hf_name: str, changed: Array | dict[str, Array]) -> dict[str, Array]:
    """What the file has of a tensor, under GGUF's names; of experts, gate and up are two."""
    names = {hf: ours for ours, hf in ARCHITECTURES[entry.architecture].hf_names.items()}
    match = re.fullmatch(r"\w+\.(?:layers|h)\.(\d+)\.(.*)", hf_name)
    prefix, name = (f"blk.{match[1]}.", match[2]) if match else ("", hf_name)
    if isinstance(changed, dict):
        return {prefix + ours: array for ours, array in changed.items()}
    stem, _, suffix = name.rpartition(".")
    ours = names[name] if name in names else f"{names[stem]}.{suffix}"
    if not ours.startswith("ffn_gate_up_exps"):
        return {prefix + ours: changed}
    halves = zip(("gate", "up"), np.split(changed, 2, axis=1), strict=True)
    return {prefix + ours.replace("gate_up", half): part for half, part in halves}


def general_keys(config: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for every model that has such a hyper-parameter."""
    names = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    keys = {ours: getattr(config, theirs, None) for ours, theirs in names.items()}
    if keys["expert_count"] is None:
        keys["expert_count"] = getattr(config, "num_local_experts", None)
    return {key: value for key, value in (keys | rope_keys(config)).items() if value is not None}


def rope_keys(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", PLAIN_ROPE)
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    names = {
        "rope.freq_base": "rope_theta",
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_attn_factor": "attention_factor",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    scaling = rope["rope_type"] if rope["rope_type"] in ("linear", "yarn", "longrope") else None
    keys = {ours: rope.get(theirs) for ours, theirs in names.items()}
    return keys | {"rope.scaling.type": scaling, "rope.freq_base_swa": local.get("rope_theta")}
