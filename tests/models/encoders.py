"""Tiny random models that embed, written as llama.cpp's converter would, for `localllm convert`
does not know them yet."""

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
        auto: transformers' class of it.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], Mapping[str, Any]] = no_keys
    change: Change = unchanged
    extra: Mapping[str, Callable[[Any], Array]] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"


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
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


# -- What converters do --------------------------------------------------------------------------------------------


def add_one_to_norms(name: str, array: Array, config: Any) -> Array:
    """Gemma's and Qwen 3.5's norms multiply with 1 + weight, but not the delta net's own."""
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return array + 1 if is_norm else array


LINEAR = {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0}


# -- Encoders: what they are made of is compared in `test_encoders` -----------------------------------------------


def encoder_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.causal": False,
        "pooling_type": 1,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.head_count_kv": None,
        "attention.layer_norm_rms_epsilon": None,
    }


def without_pooler(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    return {} if name.startswith("pooler.") else array


ENCODERS: dict[str, Tiny] = {
    "bert": Tiny(
        "bert", "bert", {"layer_norm_eps": 1e-5, "head_dim": None}, encoder_keys, without_pooler, auto="AutoModel"
    ),
    "nomic-bert": Tiny(
        "nomic_bert", "nomic-bert", {"layer_norm_eps": 1e-5}, encoder_keys, without_pooler, auto="AutoModel"
    ),
    "modern-bert": Tiny(
        "modernbert",
        "modern-bert",
        {"norm_eps": 1e-5, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
        lambda config: (
            encoder_keys(config)
            | {"attention.sliding_window": config.local_attention, "attention.layer_norm_epsilon": config.norm_eps}
        ),
        auto="AutoModel",
    ),
    "gemma-embedding": Tiny(
        "gemma3_text",
        "gemma-embedding",
        {
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "use_bidirectional_attention": True,
        }
        | {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": LINEAR}},
        # transformers makes 5 of it: a token and four on either side.
        lambda config: {"attention.sliding_window": 2 * (config.sliding_window - 1), "pooling_type": 1},
        add_one_to_norms,
        auto="AutoModel",
    ),
    "qwen3-embedding": Tiny("qwen3", "qwen3", keys=lambda config: {"pooling_type": 3}, auto="AutoModel"),
}


# -- Making and writing --------------------------------------------------------------------------------------------


def make_model(entry: Tiny, seed: int = 0) -> Any:
    """A random model of transformers: matrices as large as keeps activations near 1, and nothing at its default."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(entry.model_type, **(CONFIG | dict(entry.config)))
    model = getattr(transformers, entry.auto).from_config(config, attn_implementation="eager").eval().float()
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
    if name.endswith(("mlp.gate.weight", "router.weight")):
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
    names = {hf: ours for ours, hf in ARCHITECTURES[entry.architecture].conversion.names.items()}
    names |= {hf.removeprefix("model."): ours for hf, ours in names.items()}  # of a model without a head
    match = re.fullmatch(r"(?:model\.|encoder\.)?layers?\.(\d+)\.(.*)", hf_name)
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
    rope = getattr(config, "rope_parameters", None) or {}
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    names = {
        "rope.freq_base": "rope_theta",
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_attn_factor": "attention_factor",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    scaling = rope["rope_type"] if rope.get("rope_type") in ("linear", "yarn", "longrope") else None
    keys = {ours: rope.get(theirs) for ours, theirs in names.items()}
    return keys | {"rope.scaling.type": scaling, "rope.freq_base_swa": local.get("rope_theta")}
