"""Tiny random models as GGUF files, from Hugging Face configurations and weights.

No torch is needed: a configuration is a dict with the contents of ``config.json``, and weights are numpy arrays with
Hugging Face's names.  So transformers and this project (through a GGUF file) can load the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from localllm.quant.encode import quantize
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.gguf_writer import finish

Array = NDArray[np.float32]

#: A width that is not a multiple of any block or tile, two groups of heads, and an odd number of layers.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

#: GGUF names of a layer's tensors, by Hugging Face name.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
#: GGUF names of architectures with a different name.
_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}

#: File types by the type of the matrices.
_FILE_TYPES = {
    type: getattr(gguf.LlamaFileType, f"{'ALL' if type is GGMLType.F32 else 'MOSTLY'}_{type.name}{suffix}")
    for suffix, names in (("", "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q6_K"), ("_S", "Q4_K Q5_K"))
    for type in map(GGMLType.__getitem__, names.split())
}


#: Additional settings of mixtures of experts.
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "norm_topk_prob": True},
}


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return `CONFIG` with changes, as the dict of a ``config.json``."""
    return CONFIG | {"model_type": model_type} | _MIXTURES.get(model_type, {}) | changes


def n_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts per layer, 0 without experts."""
    n: int = config.get("num_local_experts") or config.get("num_experts") or 0
    return n


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Return random weights for ``config`` with Hugging Face's names, scaled to keep activations near 1."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}

    def matrix(name: str, n_out: int, n_in: int, *, bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.normal(0, n_in**-0.5, (n_out, n_in)).astype(np.float32)
        if bias:
            weights[f"{name}.bias"] = rng.normal(0, 0.2, n_out).astype(np.float32)

    def norm(name: str, n: int) -> None:
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, n).astype(np.float32)

    kind, d, f = config["model_type"], config["hidden_size"], config["intermediate_size"]
    attention_bias = config.get("attention_bias", False)
    qkv_bias, mlp_bias = attention_bias or kind == "qwen2", config.get("mlp_bias", False)
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    weights["model.embed_tokens.weight"] = rng.normal(0, 1, (config["vocab_size"], d)).astype(np.float32)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", d)
        matrix(f"{layer}.self_attn.q_proj", width, d, bias=qkv_bias)
        matrix(f"{layer}.self_attn.k_proj", kv_width, d, bias=qkv_bias)
        matrix(f"{layer}.self_attn.v_proj", kv_width, d, bias=qkv_bias)
        matrix(f"{layer}.self_attn.o_proj", d, width, bias=attention_bias)
        if kind.startswith("qwen3"):
            norm(f"{layer}.self_attn.q_norm", config["head_dim"])
            norm(f"{layer}.self_attn.k_norm", config["head_dim"])
        norm(f"{layer}.post_attention_layernorm", d)
        if n := n_experts(config):
            f = config.get("moe_intermediate_size", f)
            # Large enough to avoid nearly equal choices.
            weights[f"{layer}.mlp.gate.weight"] = rng.normal(0, 5 * d**-0.5, (n, d)).astype(np.float32)
            up = rng.normal(0, d**-0.5, (n, 2 * f, d)).astype(np.float32)
            weights[f"{layer}.mlp.experts.gate_up_proj"] = up
            weights[f"{layer}.mlp.experts.down_proj"] = rng.normal(0, f**-0.5, (n, d, f)).astype(np.float32)
            continue
        matrix(f"{layer}.mlp.gate_proj", f, d, bias=mlp_bias)
        matrix(f"{layer}.mlp.up_proj", f, d, bias=mlp_bias)
        matrix(f"{layer}.mlp.down_proj", d, f, bias=mlp_bias)
    norm("model.norm", d)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], d)
    return weights


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Array],
    *,
    type: GGMLType = GGMLType.F32,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write Hugging Face weights as a GGUF file with a vocabulary, like llama.cpp's converter.

    Args:
        type: type of the matrices.  Matrices whose width is not a multiple of its block length use float16.
        metadata: keys to add, or to remove if the value is None; see `write_file`.
    """
    arch = gguf_architecture(config)
    tensors = {
        name: encode(array, GGMLType.F32 if "ffn_gate_inp" in name else type)
        for name, array in gguf_tensors(config, weights).items()
    }
    keys = (
        gguf_metadata(config) | {"general.file_type": int(_FILE_TYPES[type])} | spm_vocabulary(config["vocab_size"])
    )
    return write_file(path, arch, keys | dict(metadata or {}), tensors)


def write_file(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[NDArray[Any], GGMLType]]
) -> Path:
    """Write a GGUF file of metadata (int as uint32, negative or in lists as int32; float as float32) and encoded
    tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, _value_type(value))
    for name, (data, type) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(type))
    finish(writer)
    return path


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)  # int: INT32, also in arrays


def tiny_gguf(path: Path, model_type: str = "llama", *, type: GGMLType = GGMLType.F32, **changes: Any) -> Path:
    """Write a tiny random model with a vocabulary of 300 tokens, which `localllm.load` can load.

    For the K formats, whose blocks have 256 values, the widths are chosen so that every matrix can use the format.
    """
    if BLOCK_SIZES[type].length == 256:
        changes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} | changes
        if model_type == "qwen3_moe":
            changes = {"moe_intermediate_size": 256} | changes
    settings = config(model_type, **changes)
    return write_gguf(path, settings, random_weights(settings), type=type)


def encode(array: Array, type: GGMLType) -> tuple[NDArray[Any], GGMLType]:
    """Encode a matrix as blocks of ``type``, or as float16 if its rows are not whole blocks; a vector as float32."""
    if array.ndim == 1 or type == GGMLType.F32:
        return array, GGMLType.F32
    if array.shape[-1] % BLOCK_SIZES[type].length:
        return array.astype(np.float16), GGMLType.F16
    if type in (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K):  # types that the gguf package cannot write
        return quantize(array.reshape(-1, array.shape[-1]), type).reshape(*array.shape[:-1], -1), type
    return gguf.quants.quantize(array, gguf.GGMLQuantizationType(type)), type


def gguf_architecture(config: Mapping[str, Any]) -> str:
    model_type: str = config["model_type"]
    return _ARCHITECTURES.get(model_type, model_type)


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that llama.cpp's converter writes for a ``config.json``."""
    arch = gguf_architecture(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_theta"],
    }
    if n := n_experts(config):
        keys |= {"expert_count": n, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        keys["rope.scaling.type"] = scaling["rope_type"]
        keys["rope.scaling.factor"] = scaling["factor"]
    names = {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "mscale_all_dim": "yarn_log_multiplier",
    }
    if scaling.get("rope_type") == "yarn":
        keys |= {f"rope.scaling.{ours}": scaling[theirs] for theirs, ours in names.items() if theirs in scaling}
    return {f"{arch}.{key}": value for key, value in keys.items()}


def gguf_tensors(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return tensors with GGUF's names; for llama, query and key rows are reordered to interleaved pairs."""
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: dict[str, Array] = {}
    for name, array in weights.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." in name:
            tensors |= _expert_tensors(name, array)
            continue
        stem, _, kind = name.rpartition(".")
        ours = _gguf_name(stem)
        if gguf_architecture(config) == "llama" and ours.endswith(("attn_q", "attn_k")):
            array = interleave_pairs(array, n_heads if ours.endswith("q") else n_kv_heads)
        tensors[f"{ours}.{kind}"] = array
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    return tensors


def _expert_tensors(name: str, array: Array) -> dict[str, Array]:
    """Return the gate and up matrices of all experts, which Hugging Face joins in one array; or the down matrices."""
    prefix = f"blk.{name.split('.')[2]}"
    if name.endswith("down_proj"):
        return {f"{prefix}.ffn_down_exps.weight": array}
    gate, up = (np.ascontiguousarray(half) for half in np.split(array, 2, axis=1))
    return {f"{prefix}.ffn_gate_exps.weight": gate, f"{prefix}.ffn_up_exps.weight": up}


def _gguf_name(stem: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return top[stem]
    _, _, layer, name = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[name]}"


def interleave_pairs(array: Array, n_heads: int) -> Array:
    """Reorder rows [n_heads * head_dim] of each head from (0 … n/2 | n/2 … n) to (0, n/2, 1, n/2 + 1, …)."""
    halves = array.reshape(n_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def llama3_factors(config: Mapping[str, Any]) -> Array:
    """Return Llama 3.1's divisors of the rotary frequencies, which converters write into the file.

    Source: Meta's llama-models, ``apply_scaling``.
    """
    scaling = config["rope_scaling"]
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors: Array = (1 / ((1 - kept) / scaling["factor"] + kept)).astype(np.float32)
    return factors


def spm_vocabulary(n_vocab: int) -> dict[str, Any]:
    """Return a SentencePiece vocabulary: 3 special tokens, 256 bytes, then letters and a few words."""
    words = "▁t he ▁the in er an ▁a on re nd ▁and"
    pieces = ["▁", *"etaoinshrdlucmfwygpbvkxqjz", *words.split()]
    pieces += [f"<extra_{i}>" for i in range(n_vocab - 259 - len(pieces))]
    pieces = pieces[: n_vocab - 259]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
