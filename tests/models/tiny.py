"""Tiny random models of transformers, written as GGUF files with the names and keys that llama.cpp's converter has.

To test one more architecture, add an entry to `TINY`: transformers' configuration, and what the file has beyond what
`general_keys` and the architecture's ``HF_NAMES`` give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.models.registry import ARCHITECTURES
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models

Array = NDArray[np.float32]
#: Of a tensor with its name in transformers: others under theirs, or the same one changed.
Change = Callable[[str, Array, Any], Array]


def unchanged(name: str, array: Array, config: Any) -> Array:
    return array


@dataclass(frozen=True)
class Tiny:
    """An entry: a configuration of transformers, and how a file of it is written.

    Attributes:
        model_type: transformers' name of the architecture.
        architecture: GGUF's.
        config: what differs from `CONFIG`.
        keys: further keys, without the architecture's name.
        change: what llama.cpp's converter does to a tensor.
        split: of experts' "gate_up_proj", whether gate and up take turns row by row.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    change: Change = unchanged


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


DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5},
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
SHARED_EXPERT = {"shared_expert_intermediate_size": 80}
WINDOW = {"sliding_window": 7}
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}

TINY: dict[str, Tiny] = {
    "olmo2": Tiny("olmo2", "olmo2"),
    "olmo3": Tiny(
        "olmo3",
        "olmo2",
        WINDOW | {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": YARN}},
        window_keys,
    ),
    "qwen3": Tiny("qwen3", "qwen3"),
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
}


# -- Making and writing --------------------------------------------------------------------------------------------


def make_model(entry: Tiny, seed: int = 0) -> Any:
    """A random model of transformers: matrices as large as keeps activations near 1, and nothing at its default."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(entry.model_type, **(CONFIG | dict(entry.config)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
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
    if re.search(r"norm[\w.]*weight$", name):
        return rng.uniform(0.5, 1.5, shape) - shifted
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.2, 2, shape))
    if name.endswith(("mlp.gate.weight", "router.weight")):
        return rng.normal(0, 5 * shape[-1] ** -0.5, shape)  # so large that no choice is a close call
    if len(shape) == 1 or "bias" in name or "sinks" in name:
        return rng.normal(0, 0.2, shape)
    return rng.normal(0, shape[-1] ** -0.5, shape)


def write(path: Path, entry: Tiny, model: Any, type: GGMLType = GGMLType.F32) -> Path:
    """Writes a model of transformers as llama.cpp's converter would."""
    config, tensors = model.config, dict[str, Array]()
    for hf_name, parameter in model.state_dict().items():
        if hf_name != "lm_head.weight" or not config.tie_word_embeddings:
            array = entry.change(hf_name, parameter.numpy(), config)
            tensors |= {name: np.ascontiguousarray(x) for name, x in named(entry, hf_name, array).items()}
    keys = general_keys(config) | dict(entry.keys(config))
    encoded = {name: tiny_models.encode(array, type) for name, array in tensors.items()}
    metadata = {f"{entry.architecture}.{key}": value for key, value in keys.items()}
    return tiny_models.write_file(
        path, entry.architecture, metadata | tiny_models.spm_vocabulary(config.vocab_size), encoded
    )


def named(entry: Tiny, hf_name: str, array: Array) -> dict[str, Array]:
    """The tensor under GGUF's name; of experts, gate and up are two."""
    names = {hf: ours for ours, hf in ARCHITECTURES[entry.architecture].hf_names.items()}
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", hf_name)
    prefix, name = (f"blk.{match[1]}.", match[2]) if match else ("", hf_name)
    stem, _, suffix = name.rpartition(".")
    ours = names[name] if name in names else f"{names[stem]}.{suffix}"
    if not ours.startswith("ffn_gate_up_exps"):
        return {prefix + ours: array}
    halves = zip(("gate", "up"), np.split(array, 2, axis=1), strict=True)
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
    rope = config.rope_parameters
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
