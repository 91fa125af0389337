"""``config.json``: a checkpoint's hyper-parameters, and the GGUF keys that most architectures have of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm import nesting
from localllm.errors import ModelError, path_text, quoted
from localllm.kernels.regular_file import read_regular
from localllm.models.config import ModelConfig

#: Bytes that a JSON file of a checkpoint may have; large vocabularies take 35 MB.
_MAX_BYTES = 1 << 28


#: What GPT-2, DBRX, OpenELM and Kimi Linear call otherwise than the rest.
_OTHER_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "d_model": "hidden_size",
    "model_dim": "hidden_size",
    "num_transformer_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "d_kv": "head_dim",
}


class MissingSetting(ModelError, AttributeError):
    """config.json lacks a value that the architecture needs."""


class Config:
    """Values of ``config.json`` as attributes; those of ``text_config``, in models with images, and of
    ``transformer_layer_config``, in drafters, as if its own."""

    def __init__(self, values: dict[str, Any]) -> None:
        text = values.get("text_config") or values.get("transformer_layer_config")
        self.values = values | text if isinstance(text, dict) else values
        values = self.values
        self.values = {new: values[old] for old, new in _OTHER_NAMES.items() if old in values} | values
        if isinstance(kinds := values.get("layers_block_type"), list):  # Nemotron, which does not count them
            self.values = {"num_hidden_layers": len(kinds)} | self.values
        # of the rotation, whether the file has them there, in ``rope_scaling``, or on their own
        self.rope_parameters = self._rope()
        self.tensors: Mapping[str, Any] = {}  # `localllm.convert.sources.Source` of the checkpoint's, by their names
        self.n_nextn = 0  # blocks behind the last layer, each of which predicts one token more
        self.target: ModelConfig | None = None  # of a drafter, the model that it drafts for

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise MissingSetting(f"config.json has no {name}, which {self.values.get('model_type')} needs") from None

    def _rope(self) -> dict[str, Any]:
        values = self.values
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ModelError(f"config.json has rope_scaling = {quoted(rope)}, which must be an object")
        if "full_attention" in rope or "sliding_attention" in rope:
            return rope
        names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        rope = {name: values[name] for name in names if values.get(name) is not None} | rope
        rope = {"rope_theta": 10_000.0, "rope_type": rope.get("type", "default")} | rope
        if "rope_local_base_freq" in values:  # Gemma 3 of 2025
            return {"full_attention": rope, "sliding_attention": {"rope_theta": values["rope_local_base_freq"]}}
        return rope


def read_file(path: Path) -> bytes | None:
    """Return the content of a small file of a checkpoint; None if there is none."""
    try:
        return read_regular(path, _MAX_BYTES, folder=path.parent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{path_text(path)} cannot be read ({reason}): download the checkpoint again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the values of a checkpoint's JSON file; empty if there is none."""
    if (data := read_file(path)) is None:
        return {}
    try:
        value = nesting.parse_json(data.decode())
    except ValueError as error:
        raise ModelError(f"{path_text(path)} cannot be read as JSON ({error!s:.100}): download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path_text(path)} is not a JSON object: download it again")
    return value


#: Names in config.json, the first that is there counts, by GGUF's.
_NAMES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon",
    "expert_count": "num_local_experts num_experts n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_ROPE_NAMES = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_SCALINGS = ("linear", "yarn", "longrope")
#: Keys whose values are floats, also where config.json has 10000 for 10000.0: llama.cpp takes no others.
_FLOATS = re.compile(
    r"rope\.(freq_base\w*|scale_linear|scaling\.(factor|alpha|attn_factor|yarn_\w+))|xielu\.\w+"
    r"|.*(scale|epsilon|softcapping|magnitude|lower_bound)|(.*\.)?(swiglu_clamp|clamp)_\w+|attention\.max_alibi_bias"
    r"|attention\.compress_rope_freq_base"
)


def general_keys(config: Config) -> dict[str, Any]:
    """GGUF keys that llama.cpp's converter writes for every model; None where the hyper-parameter is missing."""
    keys: dict[str, Any] = {}
    for key, names in _NAMES.items():
        found = [config.values[name] for name in names.split() if config.values.get(name) is not None]
        keys[key] = found[0] if found else None
    if keys["attention.head_count_kv"] is None:
        keys["attention.head_count_kv"] = keys["attention.head_count"]
    if config.values.get("is_causal") is False:
        keys["attention.causal"] = False
    rope = config.rope_parameters
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    kind = {"su": "longrope"}.get(rope.get("rope_type", ""), rope.get("rope_type"))
    if kind in _SCALINGS:
        keys["rope.scaling.type"] = kind
        keys |= {ours: rope.get(theirs) for ours, theirs in _ROPE_NAMES.items()}
    keys |= {"rope.freq_base": rope.get("rope_theta"), "rope.freq_base_swa": local.get("rope_theta")}
    return keys


def with_floats(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys, with whole numbers as floats where GGUF files have those."""

    def as_float(value: Any) -> Any:
        if isinstance(value, list):
            return [as_float(each) for each in value]
        return float(value) if type(value) is int else value

    return {key: as_float(value) if _FLOATS.fullmatch(key) else value for key, value in keys.items()}
