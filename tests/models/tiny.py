"""Tiny random transformers models, saved by transformers and converted like ``localllm convert`` does.

To test another architecture, add an entry to `TINY` with the transformers configuration of a model that uses all its
special features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert import Checkpoint
from localllm.convert.defaults import NAMES
from localllm.gguf.writer import read_back
from localllm.models import deepseek2, qwen3next, qwen35
from localllm.models.registry import ARCHITECTURES, Conversion
from localllm.quantize import plan, run
from tests.helpers.checkpoints import parsed, write_tokenizer
from tests.models.written import WRITTEN, Written, WrittenModel
from tests.models.written_rwkv import WRITTEN_RWKV

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Tiny:
    """An entry.

    Attributes:
        model_type: the architecture's name in transformers.
        architecture: the architecture's name in GGUF.
        config: changes to `CONFIG`.
        conversion: replaces the conversion of ``localllm convert``.
        auto: transformers class of the model.
        release: converts a configuration and tensors to a released model that transformers lacks but that computes
            the same.
        change: changes the transformers model in place to another model, including its weights.
        written: a model that transformers lacks; the other attributes are ignored.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    conversion: Conversion | None = None
    auto: str = "AutoModelForCausalLM"
    release: Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]] | None = None
    change: Callable[[Any], None] = lambda model: None
    written: Written | None = None


def with_decays(model: Any) -> None:
    """Restore the decays of MiniMax-01, and do not save them, as in released checkpoints."""
    for layer in model.model.layers:
        if hasattr(attention := layer.self_attn, "slope_rate"):
            slopes = attention.get_slope_rate()
            for name, values in zip(("query", "key", "diagonal"), attention.decay_factors(slopes), strict=True):
                getattr(attention, f"{name}_decay").copy_(values)
            attention.slope_rate.copy_(slopes)
            attention._non_persistent_buffers_set |= {*attention._buffers}


#: Two groups of heads, a width that is not a multiple of a block or tile, and few tokens.
CONFIG: dict[str, Any] = parsed("""
    hidden_size=64 intermediate_size=172 num_hidden_layers=4 num_attention_heads=4 num_key_value_heads=2 head_dim=16
    vocab_size=300 max_position_embeddings=128 rms_norm_eps=1e-5 tie_word_embeddings=False pad_token_id=0
    bos_token_id=1 eos_token_id=2 attn_implementation=eager
""")
YARN = parsed("""
    rope_type=yarn rope_theta=10_000.0 factor=4.0 original_max_position_embeddings=32 beta_fast=32.0 beta_slow=1.0
""")
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = parsed("""
    rope_type=llama3 rope_theta=10_000.0 factor=8.0 low_freq_factor=1.0 high_freq_factor=4.0
    original_max_position_embeddings=32
""")


DELTA_NET: dict[str, Any] = parsed("""
    linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=16 linear_value_head_dim=16
""") | {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}
KIMI_DELTA_NET = parsed("head_dim=16 num_heads=4 short_conv_kernel_size=4") | {
    "full_attn_layers": [2, 5],
    "kda_layers": [1, 3, 4],
}
SECTIONS = {"rope_parameters": DELTA_NET["rope_parameters"] | {"mrope_section": [2, 1, 1]}}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LOCAL_MIXTURE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
SHARED_EXPERT = {"shared_expert_intermediate_size": 80}
QWEN4EXP = (
    DELTA_NET
    | SECTIONS
    | MIXTURE
    | SHARED_EXPERT
    | {"layer_types": ["linear_attention", "indexed_attention"] * 2, "output_gate_type": "sigmoid"}
    | {"hc_count": 3, "hc_lowrank": 24, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32}
    | {"indexer_budget": 12, "indexer_compress_ratio": 4, "ple_layer_ids": [3], "heads_per_ngram": 2}
    | {"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3}
)
WINDOW = {"sliding_window": 7}
GRANITE = parsed("attention_multiplier=0.2 embedding_multiplier=3.0 residual_multiplier=0.4 logits_scaling=2.5")
LINEAR = {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0}

#: Scalar and list multipliers, which the converter applies to matrices.
FALCON_MULTIPLIERS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
HALF_ROTATED = {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}
LOCAL_HALF = HALF_ROTATED["rope_parameters"] | {"rope_theta": 500.0}
NEMOTRON = parsed("""
    ssm_state_size=16 mamba_num_heads=8 mamba_head_dim=16 n_groups=2 n_routed_experts=6 num_experts_per_tok=2
    moe_intermediate_size=48 moe_shared_expert_intermediate_size=80 routed_scaling_factor=1.5
""") | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}
NEMOTRON_MOE = NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
}
MAMBA = parsed("""
    intermediate_size=128 state_size=16 time_step_rank=6 layer_norm_epsilon=1e-5 tie_word_embeddings=True
""")
GRANITE_HYBRID = (
    GRANITE
    | parsed("mamba_d_state=16 mamba_n_heads=8 mamba_d_head=16 mamba_n_groups=1")
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
)
LFM2 = {
    "tie_word_embeddings": True,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "rope_parameters": PLAIN_ROPE,
}
LFM3 = {
    "tie_word_embeddings": True,
    "rms_norm_eps": None,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "rope_parameters": {
        "sliding_attention": PLAIN_ROPE,
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
    },
}
LAGUNA = (
    WINDOW
    | MIXTURE
    | SHARED_EXPERT
    | {
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "num_attention_heads_per_layer": [4, 6, 6, 6],
        "moe_routed_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": YARN | {"partial_rotary_factor": 0.5},
            "sliding_attention": PLAIN_ROPE | {"rope_theta": 500.0},
        },
    }
)
LLAMA4 = LOCAL_MIXTURE | parsed("""
    num_experts_per_tok=1 interleave_moe_layer_step=2 intermediate_size_mlp=172 num_hidden_layers=8
""")
STABLELM = HALF_ROTATED | {"rms_norm_eps": None}
NEOX = STABLELM | {"num_key_value_heads": 4}
COHERE = {"rms_norm_eps": None, "tie_word_embeddings": True, "logit_scale": 0.3, "rope_parameters": PLAIN_ROPE}
LATENTS = parsed("""
    num_key_value_heads=4 head_dim=32 q_lora_rank=48 kv_lora_rank=64 qk_nope_head_dim=32 qk_rope_head_dim=32
    v_head_dim=32 n_routed_experts=8 n_shared_experts=2 num_experts_per_tok=2 moe_intermediate_size=48
    first_k_dense_replace=1 norm_topk_prob=True routed_scaling_factor=1.5 n_group=4 topk_group=2
""")
INDEXER = {"index_n_heads": 8, "index_head_dim": 48, "index_topk": 24}
HY_V4 = parsed("n_group=1 topk_group=1 swiglu_limit=0.7 hc_magnitude=1.7 hc_eps=1e-3") | {
    "indexer_types": ["full", "shared", "full", "shared"]
}
DOTS3 = parsed("""
    n_group=1 topk_group=1 num_hidden_layers=5 sliding_window=7 head_dim=64 shared_experts_intermediate_size=48
    swa_num_attention_heads=2 swa_num_key_value_heads=2 swa_q_lora_rank=48 swa_kv_lora_rank=96 swa_head_dim=96
    swa_qk_nope_head_dim=64 swa_qk_rope_head_dim=32 swa_v_head_dim=48 rope_theta=10_000.0 swa_rope_theta=500.0
""") | {"layer_types": ["full_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 2]}
GLM53 = {
    "text_config": CONFIG
    | {key: value for key, value in LATENTS.items() if key not in ("n_group", "topk_group")}
    | INDEXER
    | {"index_topk": 12, "index_kpool": 4, "qk_rope_head_dim": 0, "swiglu_limit": 0.7, "hc_eps": 1e-3}
    | {"linear_head_dim": 16, "linear_num_heads": 4, "hc_sinkhorn_iters": 3}
    | {"mlp_layer_types": ["dense", *["sparse"] * 4]}
    | {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention", "full_attention"]}
    | {"indexer_types": ["full", "full", "shared", "full", "full"], "num_hidden_layers": 5},
    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32}
    | {"projection_intermediate_size": 32, "image_size": 28},
}
DEEPSEEK4 = parsed("""
    num_hidden_layers=5 intermediate_size=None num_key_value_heads=1 head_dim=64 partial_rotary_factor=0.25
    q_lora_rank=48 o_groups=2 o_lora_rank=32 sliding_window=7 index_n_heads=8 index_head_dim=32 index_topk=4
    n_routed_experts=8 num_experts_per_tok=2 moe_intermediate_size=48 swiglu_limit=0.7 hc_eps=1e-3
    hc_sinkhorn_iters=3 rope_theta=10_000.0 compress_rope_theta=160_000.0
""") | {
    "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "mlp_layer_types": [*["hash_moe"] * 2, *["moe"] * 3],
    "rope_parameters": {
        "main": PLAIN_ROPE | {"partial_rotary_factor": 0.25},
        "compress": YARN | {"rope_theta": 160_000.0, "partial_rotary_factor": 0.25, "attention_factor": 1.0},
    },
}
AFMOE = parsed("""
    num_shared_experts=2 num_dense_layers=1 route_scale=1.5 mup_enabled=True global_attn_every_n_layers=4
""")
NORTH = (
    COHERE
    | WINDOW
    | MIXTURE
    | parsed("""
        rms_norm_eps=1e-5 intermediate_size=48 prefix_dense_intermediate_size=172 first_k_dense_replace=2
        num_shared_experts=2 norm_topk_prob=False expert_selection_fn=sigmoid
    """)
)
FALCON = parsed("""
    rms_norm_eps=None tie_word_embeddings=True alibi=False bias=False hidden_size=128 head_dim=None
""")
NEMOTRON_DENSE = HALF_ROTATED | {"rms_norm_eps": None}
VISION = parsed("depth=1 hidden_size=32 embed_dim=32 out_hidden_size=64 intermediate_size=32 num_heads=2") | {
    "deepstack_visual_indexes": [0]
}


def with_vision(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a Qwen model that sees, for comparing only its text."""
    rope = {"rope_parameters": PLAIN_ROPE | {"mrope_section": [4, 2, 2]}}
    return {"text_config": CONFIG | rope | dict(text), "vision_config": VISION}


PADDLEOCR = {
    "text_config": CONFIG | {"rope_parameters": PLAIN_ROPE | {"mrope_section": [4, 2, 2]}},
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
MINIMAX_M3 = {
    "text_config": CONFIG
    | LOCAL_MIXTURE
    | HALF_ROTATED
    | {"rotary_dim": 8, "dense_intermediate_size": 172, "shared_intermediate_size": 48, "routed_scaling_factor": 1.5}
    | {"mlp_layer_types": ["dense", *["sparse"] * 3], "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3]}
    | {"index_n_heads": 2, "index_head_dim": 32, "index_block_size": 4, "index_topk_blocks": 3},
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"image_size": 28},
    "projector_hidden_size": 32,
}
MUSE_GLIMMER = {
    "text_config": CONFIG | WINDOW | {"output_multiplier": 0.7, "final_logit_softcapping": 3.0},
    "vision_config": parsed("""
        hidden_size=32 intermediate_size=32 num_hidden_layers=1 num_attention_heads=2 patch_size=4 pos_emb_height=4
        pos_emb_width=4
    """),
}
LARA = DELTA_NET | {
    "layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"],
    "rope_parameters": PLAIN_ROPE,
    "tie_word_embeddings": True,
}
KOLIBRI = {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "rope_parameters": PLAIN_ROPE}
PHIMOE = parsed("attention_bias=True lm_head_bias=True head_dim=None original_max_position_embeddings=128") | {
    "rope_parameters": PLAIN_ROPE
    | {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_mscale": 1.0, "long_mscale": 1.0}
    | {"long_factor": [1.5 + i / 4 for i in range(8)], "short_factor": [1 + i / 20 for i in range(8)]}
}
STEP35 = {
    "text_config": CONFIG
    | WINDOW
    | parsed("""
        num_sliding_attention_heads=6 n_routed_experts=6 num_experts_per_tok=2 moe_intermediate_size=48
        share_expert_dim=80 moe_router_scaling_factor=1.5
    """)
    | {
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "swiglu_limits": [None, None, 0.0, 0.7],
        "swiglu_limits_shared": [None, None, 0.0, 0.5],
        "rope_parameters": {
            "full_attention": LLAMA3 | {"partial_rotary_factor": 0.5},
            "sliding_attention": PLAIN_ROPE | {"rope_theta": 500.0},
        },
    },
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
}
LING3 = LATENTS | parsed("num_local_experts=8 layer_group_size=2 q_lora_rank=None first_k_dense_replace=1")
DBRX = (
    dict.fromkeys(key for key in CONFIG if re.search("hidden|intermediate|head|rms_norm", key))
    | parsed("d_model=64 n_heads=4 n_layers=4")
    | {
        "attn_config": {"clip_qkv": 0.9, "kv_n_heads": 2, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
    }
)
#: DeepSeek V3's experts after standard attention.
ROUTED = {key: value for key, value in LATENTS.items() if not re.search("head|rank", key)}
MINICPM = parsed("attention_multiplier=0.25 embedding_multiplier=12.0 residual_multiplier=0.7 logits_scaling=4.0")
MINICPM3 = parsed("""
    num_key_value_heads=4 head_dim=None hidden_size=128 tie_word_embeddings=True q_lora_rank=48 kv_lora_rank=64
    qk_nope_head_dim=32 qk_rope_head_dim=32
""")
MINICPM3_LONGROPE = PLAIN_ROPE | {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "long_factor": [1.5 + i / 4 for i in range(16)],
    "short_factor": [1 + i / 20 for i in range(16)],
}
#: Files of 2025 interleave query, key, value and gate of each key head.
OLD_QWEN3NEXT = Conversion(
    {"linear_attn.in_proj_qkvz": "ssm_in"},
    qwen3next.hf_keys,
    tensor=lambda name, array, config: qwen35.delta_net_tensor(name, array),
)
#: Files of 2024 store one matrix from latents to keys and values.
OLD_LATENTS = Conversion(
    keys=lambda config: (
        deepseek2.hf_keys(config)
        | {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": config.v_head_dim,
            "attention.key_length_mla": None,
            "attention.value_length_mla": None,
        }
    )
)
GEMMA3N = parsed("""
    num_hidden_layers=6 num_kv_shared_layers=2 tie_word_embeddings=True vocab_size_per_layer_input=280
    hidden_size_per_layer_input=16 laurel_rank=8 final_logit_softcapping=3.0
""") | {
    "layer_types": [*["sliding_attention", "full_attention"] * 3],
    "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
    "rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": PLAIN_ROPE | {"rope_theta": 1e6}},
}
GEMMA4 = parsed("""
    num_hidden_layers=7 global_head_dim=32 tie_word_embeddings=True vocab_size_per_layer_input=300
    hidden_size_per_layer_input=0 final_logit_softcapping=3.0
""") | {
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
    "rope_parameters": {
        "sliding_attention": PLAIN_ROPE,
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100_000.0},
    },
}


def as_internlm2(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rename a Llama to InternLM 2's names, with query, key and value in one matrix by groups of heads."""
    import torch

    names = parsed("lm_head=output input_layernorm=attention_norm post_attention_layernorm=ffn_norm") | {
        "model.embed_tokens": "model.tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    found = {}
    for name, tensor in tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "q_proj" in name:
            rest = (tensors[name.replace("q_proj", f"{x}_proj")] for x in "kv")
            parts = [part.reshape(config["num_key_value_heads"], -1, part.shape[-1]) for part in (tensor, *rest)]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts, 1).flatten(0, 1)
        elif "_proj" not in name:
            found[name] = tensor
    return config | {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}, found


def called(
    model_type: str, kind: str
) -> Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
    """Return a release function for a model that differs from a transformers model only in its name."""
    return lambda config, tensors: (config | {"model_type": model_type, "architectures": [kind]}, tensors)


def as_bailingmoe(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a Granite without scales."""
    import torch

    names = {"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "router.layer": "gate"}
    found = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours).replace("block_sparse_moe", "mlp")
        before, _, last = name.rpartition(
            ".self_attn." if "self_attn" in name else ".mlp." if ".mlp." in name else ".shared_mlp."
        )
        if last == "q_proj.weight":
            rest = (tensors[name.replace("q_proj", f"{x}_proj")] for x in "kv")
            found[f"{before}.attention.query_key_value.weight"] = torch.cat([tensor, *rest])
        elif "input_linear" in last or "output_linear" in last:
            kinds = ("gate", "up") if "input_linear" in last else ("down",)
            is_shared = "shared_mlp" in name
            for kind, part in zip(kinds, tensor.chunk(len(kinds), 0 if is_shared else 1), strict=True):
                for i, each in enumerate([part] if is_shared else part):
                    module = "shared_experts" if is_shared else f"experts.{i}"
                    found[f"{before}.mlp.{module}.{kind}_proj.weight"] = each.clone()
        elif last not in ("k_proj.weight", "v_proj.weight"):
            found[name] = tensor
    more = {"num_experts": 6, "num_shared_experts": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 0}
    kind = {"model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"], "norm_topk_prob": True}
    kept = {
        key: value
        for key, value in config.items()
        if not re.search("multiplier|scaling|local_experts|shared_inter", key)
    }
    return kept | kind | more, found


def as_deci(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a Llama: split layer 2 into an attention and an MLP layer, and append a layer with neither."""
    blocks, found = [(2, 6.0), (2, None), (None, 6.0), (None, None), (2, 6.0), (2, 6.0)], {}
    for name, tensor in tensors.items():
        if match := re.search(r"layers\.(\d+)\.", name):
            number = int(match[1])
            is_mlp = "mlp" in name or "post_attention" in name
            number += 2 if number > 1 else int(number == 1 and is_mlp)
            name = name.replace(match[0], f"layers.{number}.")
        found[name] = tensor
    each = [
        {"attention": {"n_heads_in_group": n, "replace_with_linear": False}, "ffn": {"ffn_mult": part}}
        for n, part in blocks
    ]
    kind = {"model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"], "num_hidden_layers": len(blocks)}
    return config | kind | {"block_configs": each, "head_dim": None}, found


def as_orion(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a StableLM that rotates whole heads."""
    kind = {"model_type": "orion", "architectures": ["OrionForCausalLM"]}
    rope = dict(config["rope_parameters"])
    del rope["partial_rotary_factor"]  # Orion has no such setting; StableLM's default is 0.25
    changes = {"rope_parameters": rope, "rms_norm_eps": config["layer_norm_eps"], "layer_norm_eps": None}
    return config | kind | changes, tensors


def as_deepseek_v4(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert to names and settings of released models, because transformers' round trip changes names."""
    rope, n_hashed = config.pop("rope_parameters")["compress"], config.pop("mlp_layer_types").count("hash_moe")
    rates = {"sliding_attention": 0} | config.pop("compress_rates")
    config |= {
        "compress_ratios": [rates[kind] for kind in config.pop("layer_types")],
        "num_hash_layers": n_hashed,
        "rope_scaling": {"type": "yarn"} | {key: rope[key] for key in rope if key[:4] in ("beta", "fact", "orig")},
    }
    names = {r"^model\.": "", r"\.attn\.norm": ".attn.kv_norm", r"hc_head\.hc_": "hc_head_", "embed_tokens": "embed"}
    for theirs, ours in names.items():
        tensors = {re.sub(theirs, ours, name): tensor for name, tensor in tensors.items()}
    return config, tensors


def as_hy_v4(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reorder rotated rows to pairs of neighbours, like released models in llama.cpp; transformers rotates halves."""
    n_rot, dims = config["qk_rope_head_dim"], {"q_b_proj": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    dims |= {"kv_a_proj_with_mqa": config["kv_lora_rank"] + n_rot} | dict.fromkeys(("wq_b", "wk", "k_norm"), 48)
    for name, tensor in tensors.items():
        if dim := dims.get(name.split(".")[-2]):
            heads = tensor.reshape(-1, dim, *tensor.shape[1:])
            turned = heads[:, dim - n_rot :].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            heads[:, dim - n_rot :] = turned.clone()
    # transformers' round trip changes names
    names = {
        r"\.hc_pre\.(hc_head|hc_\w+_layer)": r".\1",
        "_layer.hc_": "_layer.hc_pre.hc_",
        r"(\.mlp\..*)linear_gate": r"\1gate_proj",
    }
    for theirs, ours in names.items():
        tensors = {re.sub(theirs, ours, name): tensor for name, tensor in tensors.items()}
    return config, tensors


def as_dots3_note(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings with the names in released checkpoints."""
    rope, layers, kinds = (config.pop(name) for name in ("rope_parameters", "per_layer_config", "layer_types"))
    names = "num_attention_heads num_key_value_heads q_lora_rank kv_lora_rank head_dim qk_nope_head_dim"
    local = config | next(iter(layers.values()))
    config |= {f"swa_{name}": local[name] for name in (*names.split(), "qk_rope_head_dim", "v_head_dim")}
    config["layer_types"] = [kind.replace("indexed", "full") for kind in kinds]
    config |= {"rope_theta": rope["indexed_attention"]["rope_theta"], "rope_scaling": None, "use_dsa": True}
    config |= {"swa_rope_theta": rope["sliding_attention"]["rope_theta"], "k_rope_only_layernorm": True}
    config |= {"sliding_window_size": config.pop("sliding_window"), "use_sliding_window": True}
    config["moe_shared_expert_intermediate_size"] = config.pop("shared_experts_intermediate_size")
    config |= {"first_k_dense_replace": config.pop("mlp_layer_types").count("dense"), "moe_layer_freq": 1}
    config |= {"apply_mla_qkv_lora_rescale": True, "attention_gate_type": "headwise", "final_norm": "RMSNorm"}
    config |= {"swa_attention_gate_type": "headwise", "normalization": "RMSNorm", "scoring_func": "sigmoid"}
    config |= {"topk_method": "noaux_tc", "use_dynamic_rsf": False, "moe_gating_fp32": False}
    return config | {"model_type": "dots3_note", "architectures": ["Dots3NoteForCausalLM"]}, tensors


def as_minicpm(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a Granite to MiniCPM's names of its scales."""
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    kept = {key: value for key, value in config.items() if "multiplier" not in key and "scaling" not in key}
    return kept | scales | {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}, tensors


def renamed(
    names: Mapping[str, str], settings: Mapping[str, Any], qkv: str = ""
) -> Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
    """Return a release function that renames tensors in order and changes settings; None removes a setting.

    ``qkv`` names a matrix that joins queries, keys and values.
    """

    def release(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        found = {}
        for name, tensor in tensors.items():
            if qkv and re.search(r"\b[kv]_proj", name):
                continue
            if qkv and "q_proj" in name:
                tensor = torch.cat([tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
                name = name.replace("self_attn.q_proj", qkv)
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
        return {key: value for key, value in (config | dict(settings)).items() if value is not None}, found

    return release


as_1bitllm = renamed(
    {"self_attn.attn_sub_norm": "self_attn.inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"},
    {"model_type": "llama", "architectures": ["BitnetForCausalLM"]},
)
#: Names of GPT-2's format.
GPT2_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
}
as_qwen = renamed(
    GPT2_NAMES | {"mlp.up_proj": "mlp.w1", "mlp.gate_proj": "mlp.w2", "mlp.down_proj": "mlp.c_proj"},
    {"model_type": "qwen", "architectures": ["QWenLMHeadModel"], "intermediate_size": 2 * CONFIG["intermediate_size"]}
    | {"layer_norm_epsilon": CONFIG["rms_norm_eps"], "rotary_emb_base": 10_000.0}
    | dict.fromkeys(("rms_norm_eps", "num_key_value_heads", "head_dim", "rope_parameters")),
    qkv="attn.c_attn",
)
as_codeshell = renamed(
    GPT2_NAMES,
    {"model_type": "codeshell", "architectures": ["CodeShellForCausalLM"], "num_query_groups": 2}
    | {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5}
    | dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"))
    | dict.fromkeys(("num_key_value_heads", "norm_epsilon", "intermediate_size", "head_dim", "rope_parameters")),
    qkv="attn.c_attn",
)
as_baichuan = renamed(
    {}, {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}, qkv="self_attn.W_pack"
)


def as_openelm(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a Qwen 3 to OpenELM's names; layer 2 repeats its heads and MLP with half the weight."""
    import torch

    names = {
        "model.layers": "transformer.layers",
        "model.embed_tokens": "transformer.token_embeddings",
        "model.norm": "transformer.norm",
        "self_attn.o_proj": "attn.out_proj",
        "self_attn.": "attn.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.down_proj": "ffn.proj_2",
    }
    found = {}
    for name, tensor in tensors.items():
        twice = (lambda part: torch.cat([part, part])) if ".layers.1." in name else lambda part: part
        if "q_proj" in name:
            parts = [twice(tensors[name.replace("q_proj", f"{x}_proj")]) for x in "qkv"]
            name, tensor = name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        elif "gate_proj" in name:
            up = tensors[name.replace("gate", "up")]
            name, tensor = name.replace("mlp.gate_proj", "ffn.proj_1"), torch.cat([twice(tensor), twice(up)])
        elif re.search("[kv]_proj|up_proj", name):
            continue
        elif re.search("o_proj|down_proj", name) and ".layers.1." in name:
            tensor = torch.cat([tensor / 2] * 2, dim=1)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    width = CONFIG["intermediate_size"] / CONFIG["hidden_size"]
    kept = ("hidden_act", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    return {key: config[key] for key in kept} | parsed("""
        model_type=openelm model_dim=64 num_transformer_layers=4 max_context_length=128 head_dim=16
        ffn_dim_divisor=4 rope_freq_constant=10_000
    """) | {
        "architectures": ["OpenELMForCausalLM"],
        "num_query_heads": [4, 8, 4, 4],
        "num_kv_heads": [2, 4, 2, 2],
        "ffn_multipliers": [width, 2 * width, width, width],
    }, found


def as_maincoder(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Interleave the rotary pairs of a Hunyuan's heads."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("mlp.", "feed_forward.").replace("query_layernorm", "q_norm")
        name = name.replace("key_layernorm", "k_norm")
        if re.search("[qk]_(proj|norm)", name):
            tensor = tensor.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2).clone()
        found[name] = tensor
    kind = {"model_type": "maincoder", "architectures": ["MaincoderForCausalLM"]}
    return config | kind | {"intermediate_size_mlp": CONFIG["intermediate_size"]}, found


def as_neo_bert(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a EuroBERT to NeoBERT's names, with the rows of each head's query, key and value interleaved."""
    import torch

    names = parsed("embed_tokens=encoder input_layernorm=attention_norm post_attention_layernorm=ffn_norm") | {
        "self_attn.o_proj": "wo",
        "mlp.down_proj": "ffn.w3",
    }
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            heads = [tensors[name.replace("q_proj", f"{x}_proj")].unflatten(0, (4, 16)) for x in "qkv"]
            heads[:2] = [part.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2) for part in heads[:2]]
            name, tensor = name.replace("self_attn.q_proj", "qkv"), torch.cat(heads, dim=1).flatten(0, 1)
        elif "gate_proj" in name:
            up = tensors[name.replace("gate", "up")]
            name, tensor = name.replace("mlp.gate_proj", "ffn.w12"), torch.cat([tensor, up])
        elif re.search("[kv]_proj|up_proj", name):
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        name = "layer_norm.weight" if name == "norm.weight" else name.replace("layers.", "transformer_encoder.")
        found[f"model.{name}"] = tensor
    kind = {"model_type": "neobert", "architectures": ["NeoBERT"], "intermediate_size": 258, "max_length": 128}
    return config | kind | {"norm_eps": config["rms_norm_eps"]}, found


def as_deepseek(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Extract the text model of a DeepSeek-OCR 2."""
    names = {"model.language_model.": "model."}
    found = {name.replace(*pair): tensor for name, tensor in tensors.items() for pair in names.items()}
    found = {name: tensor for name, tensor in found.items() if re.match(r"model\.(layers|norm|embed)|lm_head", name)}
    return config["text_config"] | {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"]}, found


def choose_by_token(model: Any) -> None:
    """Assign distinct experts to every token id."""
    import torch

    rng = np.random.default_rng(3)
    for name, table in model.state_dict().items():
        if name.endswith("tid2eid"):
            table.copy_(torch.from_numpy(rng.permuted(np.tile(np.arange(8), (len(table), 1)), axis=1)[:, :2]))


def fall_with_distance(model: Any) -> None:
    """Change a BERT to four heads without positions, whose scores fall by 2^-2, …, 2^-8 per position of distance."""
    import torch

    model.embeddings.position_embeddings.weight.data.zero_()
    forward, slopes = model.forward, 2.0 ** -(2.0 * torch.arange(1, 5))

    def fallen(ids: Any) -> Any:
        places = torch.arange(ids.shape[1])
        distances = (places[:, None] - places).abs()
        return forward(ids, attention_mask=-slopes[None, :, None, None] * distances)

    model.forward = fallen


def norm_and_place(model: Any) -> None:
    """Change an MPT to learnt positions instead of ALiBi, with a LayerNorm of query and key."""
    import torch

    def rows(weight: Any) -> Any:
        return torch.nn.functional.layer_norm(weight, weight.shape[-1:])

    rng, d, wte = np.random.default_rng(4), model.config.d_model, model.transformer.wte
    model.config.attn_config.alibi, model.config.attn_config.qk_ln = False, True
    model.transformer.wpe = torch.nn.Embedding(model.config.max_seq_len, d)
    model.transformer.build_mpt_alibi_tensor = lambda *_, **__: torch.zeros(model.config.n_heads, 1, 128)
    embed, positions = wte.forward, model.transformer.wpe.weight
    wte.forward = lambda ids: embed(ids) + positions[: ids.shape[1]]
    for block in model.transformer.blocks:
        attention = block.attn
        for name in ("q_ln", "k_ln"):
            setattr(attention, name, norm := torch.nn.LayerNorm(d, bias=False))
            norm.weight.data.copy_(torch.from_numpy(rng.uniform(0.2, 0.8, d)).to(torch.bfloat16))
        multiply = attention.Wqkv.forward

        def normed(x: Any, attention: Any = attention, multiply: Any = multiply) -> Any:
            q, k, v = multiply(x).chunk(3, dim=-1)
            return torch.cat([attention.q_ln(q), attention.k_ln(k), v], dim=-1)

        attention.Wqkv.forward = normed
    positions.data.copy_(torch.from_numpy(rng.normal(0, 1, positions.shape)).to(torch.bfloat16))


def round_weights(model: Any) -> None:
    """Change the matrices of a BitNet's layers to round their weights when they compute, as in training."""
    import torch

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            scale = 1 / module.weight.abs().mean().clamp(min=1e-5)
            rounded = (module.weight * scale).round().clamp(-1, 1) / scale
            module.forward = partial(torch.nn.functional.linear, weight=rounded.detach())


def as_one_shard(model: Any) -> None:
    """Give all heads of a Chameleon the same norms, like the models that were trained on one device."""
    for name, parameter in model.state_dict().items():
        if "q_norm" in name or "k_norm" in name:
            parameter.copy_(parameter[:1].expand_as(parameter).clone())


def as_jina_bert_v2(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a BERT to Jina's names, with a gate in its MLP that is always 1."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        if "position_embeddings" in name or "pooler" in name:
            continue
        if "intermediate.dense" in name:
            rest = torch.ones_like(tensor) if name.endswith("bias") else torch.zeros_like(tensor)
            name, tensor = name.replace("intermediate.dense", "mlp.gated_layers"), torch.cat([tensor, rest])
        name = re.sub(r"(layer\.\d+)\.output\.dense", r"\1.mlp.wo", name)
        found[re.sub(r"(layer\.\d+)\.output\.LayerNorm", r"\1.mlp.layernorm", name)] = tensor
    return config | {"architectures": ["JinaBertModel"], "position_embedding_type": "alibi"}, found


DEEPSEEK_OCR = {
    "text_config": CONFIG
    | {"num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2}
    | {"moe_intermediate_size": 48, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "vision_config": {
        "sam_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16}
        | {"image_size": 32, "patch_size": 16, "global_attn_indexes": [0], "downsample_channels": [16, 32]},
        "encoder_config": {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "num_key_value_heads": 2},
    },
}
#: Hunyuan's configurations call this "dynamic".
ALPHA = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0}
CHAMELEON = {
    "vocabulary_map": {"<image>": 299},
    "vq_config": {"embed_dim": 16, "num_embeddings": 8, "latent_channels": 16, "resolution": 16, "base_channels": 32}
    | {"channel_multiplier": [1], "num_res_blocks": 1},
}
HUNYUAN_VL = {
    "text_config": CONFIG | {"tie_word_embeddings": True, "rope_parameters": ALPHA | {"mrope_section": [2, 2, 2, 2]}},
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"out_hidden_size": 64, "text_hidden_size": 64, "max_image_size": 64},
}

TINY: dict[str, Tiny] = {
    "afmoe": Tiny("afmoe", "afmoe", WINDOW | MIXTURE | AFMOE),
    "apertus": Tiny("apertus", "apertus", {"rope_parameters": LLAMA3}),
    "arcee": Tiny("arcee", "arcee", {"rope_parameters": YARN}),
    "axk2": Tiny("axk2", "axk2", LATENTS | INDEXER | {"n_group": None, "topk_group": None}),
    "baichuan": Tiny("llama", "baichuan", {"num_key_value_heads": 4}, release=as_baichuan),
    "bailingmoe2": Tiny("sarvam_moe", "bailingmoe2", ROUTED | {"n_shared_experts": 1}),
    "bailingmoe3": Tiny("bailing_hybrid", "bailingmoe3", LING3),
    "bailingmoe": Tiny(
        "granitemoeshared",
        "bailingmoe",
        dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
        | {"attention_multiplier": 0.25, "shared_intermediate_size": 96}
        | LOCAL_MIXTURE,
        release=as_bailingmoe,
    ),
    "codeshell": Tiny(
        "starcoder2", "codeshell", {"rms_norm_eps": None, "intermediate_size": 256}, release=as_codeshell
    ),
    "cohere2": Tiny("cohere2", "cohere2", WINDOW | COHERE),
    "bitnet": Tiny(
        "bitnet",
        "bitnet",
        {"hidden_act": "silu", "tie_word_embeddings": True},
        release=as_1bitllm,
        change=round_weights,
    ),
    "bitnet-relu2": Tiny(
        "bitnet", "bitnet", {"hidden_act": "relu2", "tie_word_embeddings": True}, change=round_weights
    ),
    "bloom": Tiny(
        "bloom",
        "bloom",
        {"rms_norm_eps": None, "hidden_size": 96, "num_attention_heads": 6, "seq_length": 128}
        | {"tie_word_embeddings": True, "slow_but_exact": False},
    ),
    "chameleon": Tiny(
        "chameleon",
        "chameleon",
        CHAMELEON | {"num_key_value_heads": 4},
        auto="ChameleonForConditionalGeneration",
        change=as_one_shard,
    ),
    "chameleon-30b": Tiny(
        "chameleon", "chameleon", CHAMELEON | {"swin_norm": True}, auto="ChameleonForConditionalGeneration"
    ),
    "chatglm": Tiny("glm", "chatglm", HALF_ROTATED | {"attention_bias": True}),
    "cohere2moe": Tiny("cohere2_moe", "cohere2moe", NORTH | {"rms_norm_eps": None}),
    "cohere2moe-rms": Tiny("cohere2_moe", "cohere2moe", NORTH | {"num_shared_experts": 0, "norm_topk_prob": True}),
    "command-r": Tiny("cohere", "command-r", COHERE | {"rope_parameters": LINEAR}),
    "command-r-plus": Tiny("cohere", "command-r", COHERE | {"use_qk_norm": True}),
    "dbrx": Tiny("dbrx", "dbrx", DBRX),
    "deci": Tiny("llama", "deci", {"intermediate_size": 256, "rope_parameters": LLAMA3}, release=as_deci),
    "deepseek": Tiny(
        "deepseek_ocr2", "deepseek", DEEPSEEK_OCR, auto="DeepseekOcr2ForConditionalGeneration", release=as_deepseek
    ),
    "deepseek-ocr": Tiny("deepseek_ocr2", "deepseek2-ocr", DEEPSEEK_OCR, auto="DeepseekOcr2ForConditionalGeneration"),
    "deepseek-v2": Tiny(
        "deepseek_v2",
        "deepseek2",
        LATENTS | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "deepseek-v3": Tiny(
        "deepseek_v3", "deepseek2", LATENTS | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
    ),
    "deepseek-v3-old": Tiny("deepseek_v3", "deepseek2", LATENTS, OLD_LATENTS),
    "deepseek-v3.2": Tiny("deepseek_v32", "deepseek32", LATENTS | INDEXER),
    "deepseek-v4": Tiny("deepseek_v4", "deepseek4", DEEPSEEK4, release=as_deepseek_v4, change=choose_by_token),
    "dots3note": Tiny("dots3_note_text", "dots3note", LATENTS | INDEXER | DOTS3, release=as_dots3_note),
    "dots1": Tiny("dots1", "dots1", ROUTED | {"num_key_value_heads": 4}),
    "ernie4_5": Tiny("ernie4_5", "ernie4_5", {"tie_word_embeddings": True}),
    "ernie4_5-moe": Tiny(
        "ernie4_5_moe",
        "ernie4_5-moe",
        parsed("""
            intermediate_size=192 moe_num_experts=6 moe_k=2 moe_layer_start_index=1 moe_intermediate_size=48
            moe_num_shared_experts=2
        """),
    ),
    "exaone": Tiny("exaone", "exaone", {"rope_parameters": LLAMA3}),
    "exaone-moe": Tiny(
        "exaone_moe",
        "exaone-moe",
        WINDOW | MIXTURE | {"n_group": 3, "topk_group": 2, "num_shared_experts": 2, "rope_parameters": PLAIN_ROPE},
    ),
    "exaone4": Tiny("exaone4", "exaone4", WINDOW | {"sliding_window_pattern": 4, "rope_parameters": LLAMA3}),
    "falcon": Tiny("falcon", "falcon", FALCON),
    "falcon-40b": Tiny("falcon", "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-h1": Tiny(
        "falcon_h1",
        "falcon-h1",
        parsed("""
            mamba_d_ssm=128 mamba_n_heads=8 mamba_d_head=16 mamba_n_groups=2 mamba_d_state=16 mamba_rms_norm=True
            mamba_norm_before_gate=False
        """)
        | {"ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2], "mlp_multipliers": [0.8, 0.7]}
        | dict.fromkeys(FALCON_MULTIPLIERS, 0.9),
    ),
    "gemma": Tiny("gemma", "gemma", {"tie_word_embeddings": True}),
    "gemma2": Tiny(
        "gemma2",
        "gemma2",
        WINDOW | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
    ),
    "gemma3": Tiny(
        "gemma3_text",
        "gemma3",
        WINDOW
        | {"num_hidden_layers": 7, "tie_word_embeddings": True, "query_pre_attn_scalar": 16}
        | {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": LINEAR}},
    ),
    "gemma3n": Tiny("gemma3n_text", "gemma3n", WINDOW | GEMMA3N),
    "gemma4-dense": Tiny(
        "gemma4_text", "gemma4", WINDOW | GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    ),
    "gemma4-e2b": Tiny(
        "gemma4_text",
        "gemma4",
        WINDOW | GEMMA4 | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 4, "use_double_wide_mlp": True},
    ),
    "gemma4-moe": Tiny(
        "gemma4_text",
        "gemma4",
        WINDOW
        | GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48},
    ),
    "glm-4.7-flash": Tiny("glm4_moe_lite", "deepseek2", LATENTS | {"n_group": 1, "topk_group": 1}),
    "glm-5": Tiny(
        "glm_moe_dsa",
        "glm-dsa",
        LATENTS | INDEXER | {"index_topk": 8, "indexer_types": ["full", "full", "shared", "shared"]},
    ),
    "glm-5.3": Tiny("glm5_next", "glm5-next", GLM53, auto="Glm5NextForConditionalGeneration"),
    "glm4": Tiny(
        "glm4", "glm4", {"attention_bias": True, "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}
    ),
    "glm4moe": Tiny(
        "glm4_moe",
        "glm4moe",
        ROUTED
        | HALF_ROTATED
        | {"head_dim": 32, "num_key_value_heads": 2, "use_qk_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": Tiny("gpt_oss", "gpt-oss", WINDOW | LOCAL_MIXTURE | {"rope_parameters": YARN | {"truncate": False}}),
    "gpt2": Tiny("gpt2", "gpt2", {"num_key_value_heads": 4, "rms_norm_eps": None, "tie_word_embeddings": True}),
    "gptneox": Tiny("gpt_neox", "gptneox", NEOX),
    "gptneox-serial": Tiny("gpt_neox", "gptneox", NEOX | {"use_parallel_residual": False}),
    "granite": Tiny("granite", "granite", GRANITE),
    "granite-swa": Tiny("granite_swa", "granite_swa", GRANITE | WINDOW | {"layer_rope_theta": [0, 1e4, 1e4, 1e4]}),
    "granite-swa-moe": Tiny(
        "granitemoe_swa", "granite_swa", GRANITE | WINDOW | LOCAL_MIXTURE | {"shared_intermediate_size": 80}
    ),
    "granite-4": Tiny(
        "granitemoehybrid",
        "granitehybrid",
        GRANITE_HYBRID
        | {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 172},
    ),
    "granite-4-moe": Tiny(
        "granitemoehybrid",
        "granitehybrid",
        GRANITE_HYBRID
        | {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}
        | LOCAL_MIXTURE
        | {"shared_intermediate_size": 80},
    ),
    "granitehybrid": Tiny(
        "granitemoehybrid",
        "granitehybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 172},
    ),
    "granitehybrid-moe": Tiny(
        "granitemoehybrid", "granitehybrid", GRANITE_HYBRID | LOCAL_MIXTURE | {"shared_intermediate_size": 80}
    ),
    "granitemoe": Tiny("granitemoe", "granitemoe", GRANITE | LOCAL_MIXTURE),
    "granitemoe-shared": Tiny(
        "granitemoeshared", "granitemoe", GRANITE | LOCAL_MIXTURE | {"shared_intermediate_size": 80}
    ),
    "hunyuan-dense": Tiny("hunyuan_v1_dense", "hunyuan-dense"),
    "hunyuan-dense-alpha": Tiny("hunyuan_v1_dense", "hunyuan-dense", {"rope_parameters": ALPHA}),
    "hunyuan-moe": Tiny(
        "hunyuan_v1_moe",
        "hunyuan-moe",
        {"num_experts": 6, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [172] * 4},
    ),
    "hunyuan-vl": Tiny("hunyuan_vl", "hunyuan_vl", HUNYUAN_VL, auto="HunYuanVLForConditionalGeneration"),
    "hy-v3": Tiny("hy_v3", "hy_v3", MIXTURE | {"router_scaling_factor": 1.5, "num_shared_experts": 2}),
    "hy-v4": Tiny("hy_v4", "hy_v4", LATENTS | INDEXER | HY_V4, release=as_hy_v4),
    "internlm2": Tiny("llama", "internlm2", release=as_internlm2),
    "iquestcoder": Tiny("iquestcoder", "llama"),
    "jais2": Tiny("jais2", "jais2", {"rms_norm_eps": None, "num_key_value_heads": 4}),
    "jamba": Tiny(
        "jamba",
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 6}
        | {"num_experts": 6, "expert_layer_offset": 1},
    ),
    "jamba-dense": Tiny(
        "jamba",
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 6}
        | {"num_experts": 1, "num_experts_per_tok": 2},
    ),
    "kimi-linear": Tiny(
        "kimi_linear",
        "kimi-linear",
        LATENTS
        | MIXTURE
        | {"q_lora_rank": None, "num_experts": 8, "n_group": 1, "topk_group": 1, "num_hidden_layers": 5}
        | {"linear_attn_config": KIMI_DELTA_NET},
    ),
    "kolibri1": Tiny("kolibri1", "kolibri1", WINDOW | MIXTURE | SHARED_EXPERT | KOLIBRI),
    "laguna": Tiny("laguna", "laguna", LAGUNA),
    "laguna-by-value": Tiny("laguna", "laguna", LAGUNA | {"gating": "per-element"}),
    "lara_mini": Tiny("lara_mini", "lara_mini", WINDOW | MIXTURE | SHARED_EXPERT | LARA),
    "lfm2": Tiny("lfm2", "lfm2", LFM2),
    "lfm2moe": Tiny("lfm2_moe", "lfm2moe", LFM2 | MIXTURE | {"num_dense_layers": 1}),
    "lfm3": Tiny("lfm3", "lfm3", WINDOW | LFM3),
    "llama": Tiny("llama", "llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "llama4": Tiny(
        "llama4_text",
        "llama4",
        LLAMA4 | {"attention_chunk_size": 7, "floor_scale": 5, "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
    ),
    "llama4-defaults": Tiny("llama4_text", "llama4", LLAMA4),
    "maincoder": Tiny("hunyuan_v1_dense", "maincoder", {"tie_word_embeddings": True}, release=as_maincoder),
    "falcon-mamba": Tiny("falcon_mamba", "mamba", MAMBA | {"mixer_rms_eps": 1e-5}),
    "mamba": Tiny("mamba", "mamba", MAMBA),
    "mamba2": Tiny(
        "mamba2",
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "intermediate_size": 128},
    ),
    "mellum": Tiny(
        "mellum",
        "mellum",
        WINDOW
        | MIXTURE
        | {
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE},
        },
    ),
    "mimo2": Tiny(
        "mimo_v2_flash",
        "mimo2",
        WINDOW
        | MIXTURE
        | {"num_key_value_heads": 1, "v_head_dim": 8, "n_routed_experts": 6, "num_hidden_layers": 7}
        | {"rope_parameters": {"full_attention": HALF_ROTATED["rope_parameters"], "sliding_attention": LOCAL_HALF}},
    ),
    "minicpm": Tiny("granite", "minicpm", MINICPM, release=as_minicpm),
    "minicpm3": Tiny("minicpm3", "minicpm3", MINICPM3),
    "minicpm3-longrope": Tiny("minicpm3", "minicpm3", MINICPM3 | {"rope_parameters": MINICPM3_LONGROPE}),
    "minimax-01": Tiny(
        "minimax",
        "minimax-01",
        LOCAL_MIXTURE
        | parsed(
            "num_attention_heads=16 full_attn_alpha_factor=1.5 linear_attn_alpha_factor=1.5 mlp_alpha_factor=1.5"
        )
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
        | {"rope_parameters": PLAIN_ROPE, "block_size": 8},
        change=with_decays,
    ),
    "minimax-m2": Tiny("minimax_m2", "minimax-m2", LOCAL_MIXTURE | HALF_ROTATED),
    "minimax-m3": Tiny("minimax_m3_vl", "minimax-m3", MINIMAX_M3, auto="MiniMaxM3SparseForConditionalGeneration"),
    "mistral3": Tiny(
        "ministral3",
        "mistral3",
        {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"llama_4_scaling_beta": 0.3}
        },
    ),
    "mistral3-llama3": Tiny(
        "ministral3",
        "mistral3",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}},
    ),
    "mistral4": Tiny(
        "mistral4",
        "mistral4",
        LATENTS
        | {"n_group": 1, "topk_group": 1, "head_dim": 64}
        | {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"llama_4_scaling_beta": 0.3}
        },
        auto="Mistral4ForCausalLM",
    ),
    "mixtral": Tiny("mixtral", "llama", LOCAL_MIXTURE),
    "mpt": Tiny(
        "mpt",
        "mpt",
        dict.fromkeys(key for key in CONFIG if re.search("hidden|intermediate|head|rms_norm|max_pos", key))
        | {"d_model": 96, "n_heads": 6, "n_layers": 4, "max_seq_len": 128, "tie_word_embeddings": True}
        | {"attn_config": {"clip_qkv": 0.9, "alibi_bias_max": 8}},
    ),
    "mpt-positions": Tiny(
        "mpt",
        "mpt",
        dict.fromkeys(key for key in CONFIG if re.search("hidden|intermediate|head|rms_norm|max_pos", key))
        | {"d_model": 96, "n_heads": 6, "n_layers": 4, "max_seq_len": 128, "tie_word_embeddings": True},
        change=norm_and_place,
    ),
    "muse-glimmer": Tiny("muse_glimmer", "muse-glimmer", MUSE_GLIMMER, auto="MuseGlimmerForConditionalGeneration"),
    "nemotron": Tiny("nemotron", "nemotron", NEMOTRON_DENSE),
    "nemotron-h": Tiny("nemotron_h", "nemotron_h", NEMOTRON),
    "nemotron-h-latent": Tiny("nemotron_h", "nemotron_h_moe", NEMOTRON_MOE | {"moe_latent_size": 32}),
    "nemotron-h-moe": Tiny("nemotron_h", "nemotron_h_moe", NEMOTRON_MOE),
    "olmo": Tiny("olmo", "olmo", {"rms_norm_eps": None, "clip_qkv": 0.9}),
    "hrm-text": Tiny(
        "hrm_text", "hrm_text", {"num_hidden_layers": 2, "num_key_value_heads": None, "embedding_scale": 3.0}
    ),
    "olmo2": Tiny("olmo2", "olmo2"),
    "olmo3": Tiny(
        "olmo3", "olmo2", WINDOW | {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": YARN}}
    ),
    "olmoe": Tiny("olmoe", "olmoe", LOCAL_MIXTURE | {"num_key_value_heads": 4}),
    "openelm": Tiny("qwen3", "openelm", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}, release=as_openelm),
    "orion": Tiny(
        "stablelm",
        "orion",
        {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0}, "rms_norm_eps": None},
        release=as_orion,
    ),
    "paddleocr": Tiny("paddleocr_vl", "paddleocr", PADDLEOCR, auto="PaddleOCRVLForConditionalGeneration"),
    "pangu-embedded": Tiny(
        "llama",
        "pangu-embedded",
        {"attention_bias": True},
        release=called("PanguEmbedded", "PanguEmbeddedForCausalLM"),
    ),
    "phi2": Tiny("phi", "phi2", NEOX | {"intermediate_size": 256}),
    "phi3": Tiny("phi3", "phi3", WINDOW | {"original_max_position_embeddings": 128}),
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
    ),
    "phimoe": Tiny("phimoe", "phimoe", WINDOW | LOCAL_MIXTURE | PHIMOE),
    "qwen": Tiny("qwen2", "qwen", {"num_key_value_heads": 4}, release=as_qwen),
    "qwen2": Tiny("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen2moe": Tiny("qwen2_moe", "qwen2moe", MIXTURE | SHARED_EXPERT | {"norm_topk_prob": False}),
    "qwen2vl": Tiny("qwen2_vl", "qwen2vl", with_vision({}), auto="Qwen2VLForConditionalGeneration"),
    "qwen3": Tiny("qwen3", "qwen3"),
    "qwen35": Tiny("qwen3_5_text", "qwen35", DELTA_NET | SECTIONS),
    "qwen35moe": Tiny("qwen3_5_moe_text", "qwen35moe", DELTA_NET | SECTIONS | MIXTURE | SHARED_EXPERT),
    "qwen3moe": Tiny("qwen3_moe", "qwen3moe", MIXTURE),
    "qwen3next": Tiny("qwen3_next", "qwen3next", DELTA_NET | MIXTURE | SHARED_EXPERT),
    "qwen3next-old": Tiny("qwen3_next", "qwen3next", DELTA_NET | MIXTURE | SHARED_EXPERT, OLD_QWEN3NEXT),
    "qwen3vl": Tiny("qwen3_vl", "qwen3vl", with_vision({}), auto="Qwen3VLForConditionalGeneration"),
    "qwen3vlmoe": Tiny("qwen3_vl_moe", "qwen3vlmoe", with_vision(MIXTURE), auto="Qwen3VLMoeForConditionalGeneration"),
    "qwen4exp": Tiny("qwen4_exp_text", "qwen4exp", QWEN4EXP),
    "sarvam-105b": Tiny("sarvam_mla", "deepseek2", LATENTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "seed-oss": Tiny("seed_oss", "seed_oss", {"attention_bias": True}),
    "smollm3": Tiny("smollm3", "smollm3"),
    "stablelm": Tiny("stablelm", "stablelm", STABLELM),
    "stablelm-parallel": Tiny(
        "stablelm", "stablelm", STABLELM | {"use_parallel_residual": True, "use_qkv_bias": True}
    ),
    "stablelm-12b": Tiny("stablelm", "stablelm", STABLELM | {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder": Tiny(
        "gpt_bigcode", "starcoder", {"num_key_value_heads": None, "rms_norm_eps": None, "tie_word_embeddings": True}
    ),
    "starcoder2": Tiny("starcoder2", "starcoder2", {"tie_word_embeddings": True, "rms_norm_eps": None}),
    "youtu": Tiny(
        "youtu",
        "deepseek2",
        {key: value for key, value in LATENTS.items() if "expert" not in key and "moe" not in key}
        | {"tie_word_embeddings": True},
    ),
    "step35": Tiny("step3p7", "step35", STEP35, auto="Step3p7ForConditionalGeneration"),
    "xverse": Tiny("llama", "xverse", {"num_key_value_heads": 4}, release=called("xverse", "XverseForCausalLM")),
}

TINY |= {
    name: Tiny(str(written.settings["model_type"]), name.partition("-")[0], written=written)
    for name, written in (WRITTEN | WRITTEN_RWKV).items()
    if not written.is_encoder
}

T5: dict[str, Any] = parsed("""
    d_ff=172 rms_norm_eps=None layer_norm_epsilon=1e-5 max_position_embeddings=None num_key_value_heads=None
    intermediate_size=None tie_word_embeddings=True
""")

#: Embedding models.
ENCODERS: dict[str, Tiny] = {
    "bert": Tiny("bert", "bert", {"layer_norm_eps": 1e-5, "head_dim": None}, auto="AutoModel"),
    "xlm-roberta": Tiny(
        "xlm-roberta", "bert", {"layer_norm_eps": 1e-5, "max_position_embeddings": 129}, auto="AutoModel"
    ),
    "eurobert": Tiny("eurobert", "eurobert", auto="AutoModel"),
    "llama-embed": Tiny(
        "eurobert", "llama-embed", auto="AutoModel", release=called("llama_bidirec", "LlamaBidirectionalModel")
    ),
    "jina-bert-v2": Tiny(
        "bert",
        "jina-bert-v2",
        {"layer_norm_eps": 1e-5, "head_dim": None, "num_key_value_heads": 4},
        auto="AutoModel",
        release=as_jina_bert_v2,
        change=fall_with_distance,
    ),
    "neo-bert": Tiny("eurobert", "neo-bert", {"num_key_value_heads": 4}, auto="AutoModel", release=as_neo_bert),
    "jina-bert-v3": Tiny(
        "jina_embeddings_v3", "jina-bert-v3", {"layer_norm_eps": 1e-5, "head_dim": None}, auto="AutoModel"
    ),
    "nomic-bert": Tiny(
        "nomic_bert", "nomic-bert", {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048}, auto="AutoModel"
    ),
    "nomic-bert-moe": Tiny("", "nomic-bert-moe", auto="AutoModel", written=WRITTEN["nomic-bert-moe"]),
    "modern-bert": Tiny(
        "modernbert",
        "modern-bert",
        {"norm_eps": 1e-5, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
        auto="AutoModel",
    ),
    "embedding-gemma2": Tiny(
        "embedding_gemma2_text",
        "embedding-gemma2",
        WINDOW
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32}
        | {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 32, "embedding_dim": 64},
        auto="AutoModel",
    ),
    "gemma-embedding": Tiny(
        "gemma3_text",
        "gemma-embedding",
        TINY["gemma3"].config | {"sliding_window": 9, "use_bidirectional_attention": True},
        auto="AutoModel",
    ),
    "qwen2-embedding": Tiny("qwen2", "qwen2", {"is_causal": False}, auto="AutoModel"),
    "qwen3-embedding": Tiny("qwen3", "qwen3", auto="AutoModel"),
    "t5": Tiny("t5", "t5encoder", T5, auto="T5EncoderModel"),
    "t5-gated": Tiny("t5", "t5encoder", T5 | {"feed_forward_proj": "gated-gelu"}, auto="T5EncoderModel"),
}


def divide_queries(model: Any) -> None:
    """Make scores small, as in released models: T5 does not scale them, and starts with small queries."""
    for name, weight in model.named_parameters():
        if name.endswith((".SelfAttention.q.weight", ".EncDecAttention.q.weight")):
            weight.data /= 4


#: Models whose prompts an encoder reads.
ENCODER_DECODERS: dict[str, Tiny] = {
    "t5": Tiny("t5", "t5", T5 | {"num_decoder_layers": 3}, auto="T5ForConditionalGeneration", change=divide_queries),
    "flan-t5": Tiny(
        "t5",
        "t5",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
        auto="T5ForConditionalGeneration",
        change=divide_queries,
    ),
    "umt5": Tiny(
        "umt5",
        "t5",
        T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
        auto="UMT5ForConditionalGeneration",
        change=divide_queries,
    ),
}


def as_llada(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rename a Llama to LLaDA's names."""
    top = {"model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f"}
    top |= {"lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks"}
    names = top | {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    released, found = renamed(names, {"weight_tying": False})(config, tensors)
    for ours, theirs in NAMES["llada"]:
        released[theirs] = released.pop(ours)
    settings = parsed("""
        model_type=llada activation_type=silu layer_norm_type=rms block_type=llama block_group_size=1 mlp_ratio=4
        rope=True rope_full_precision=True rope_theta=10_000.0 alibi=False alibi_bias_max=8.0 scale_logits=False
        attention_layer_norm=False include_bias=False include_qkv_bias=False input_emb_norm=False
        multi_query_attention=None init_fn=mitchell init_std=0.02 embedding_size=300 mask_token_id=299
    """)
    for name in ("rope_parameters", "head_dim", "hidden_act", "attention_bias", "mlp_bias"):
        released.pop(name, None)
    return released | settings | {"architectures": ["LLaDAModelLM"]}, found


def as_llada_moe(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rename a Qwen 3 with experts to LLaDA-MoE's settings."""
    config = config | {"expert_intermediate_size": config["moe_intermediate_size"]}
    settings = {"model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "mask_token_id": 299}
    return {key: value for key, value in config.items() if key != "moe_intermediate_size"} | settings, tensors


_BOTH_WAYS = {"is_causal": False, "mask_token_id": 299}
#: Models that write by diffusion: their tokens see each other.
DIFFUSION: dict[str, Tiny] = {
    "dream": Tiny("qwen2", "dream", _BOTH_WAYS, release=called("Dream", "DreamModel")),
    "llada": Tiny("llama", "llada", _BOTH_WAYS, release=as_llada),
    "llada-moe": Tiny(
        "qwen3_moe", "llada-moe", MIXTURE | _BOTH_WAYS | {"norm_topk_prob": False}, release=as_llada_moe
    ),
    "rnd1": Tiny("qwen3_moe", "rnd1", MIXTURE | _BOTH_WAYS, release=called("rnd1", "RND1")),
}


# -- Making and writing --------------------------------------------------------------------------------------------


def make_model(entry: Tiny, seed: int = 0) -> Any:
    """Create a random model of transformers, with activations near 1 and no value at its default."""
    import torch
    import transformers

    rng = np.random.default_rng(seed)
    if entry.written is not None:
        return WrittenModel(entry.written, lambda name, shape: random_values(rng, name, shape, False))
    values = {key: v for key, v in (CONFIG | dict(entry.config)).items() if v is not None or key not in CONFIG}
    config = transformers.AutoConfig.for_model(entry.model_type, **values)
    kind = getattr(transformers, entry.auto)
    make = kind.from_config if entry.auto.startswith("Auto") else kind._from_config
    model = make(config, attn_implementation="eager").eval().float()
    model.release = entry.release
    model.config.allow_global_per_layer_attribute_access = True  # Gemma 4's layers have different heads
    shift = ARCHITECTURES[entry.architecture].conversion.tensor("model.norm.weight", np.zeros(1, np.float32), config)
    is_shifted = np.array_equal(shift, [1.0])
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if not parameter.is_floating_point():
                continue  # hash parameters of n-grams
            shifted = is_shifted and not name.endswith("linear_attn.norm.weight")
            values = torch.from_numpy(random_values(rng, name, tuple(parameter.shape), shifted))
            parameter.copy_(values.to(torch.bfloat16))  # the saved precision
    entry.change(model)
    return model


def random_values(rng: np.random.Generator, name: str, shape: tuple[int, ...], shifted: bool) -> NDArray[np.float64]:
    """Return random values for a parameter.  ``shifted``: norms multiply by 1 + weight."""
    if "embed_tokens" in name:
        return rng.normal(0, 1, shape)
    if not shape:
        return np.array(-0.1 if name.endswith("eps") else 0.5 if name.endswith("beta") else rng.uniform(-1.5, -0.5))
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return rng.uniform(0.2, 0.8, shape) - shifted  # keeps scores small if their scale is 1
    if len(shape) == 1 and re.search(r"norm[\w.]*weight$", name):
        return rng.uniform(0.5, 1.5, shape) - shifted
    if name.endswith(("scalar", "scale")):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.2, 2, shape))
    if name.endswith("primary_router.weight"):
        return rng.normal(0, 0.5 * shape[-1] ** -0.5, shape)  # small enough for distinct sigmoids
    if name.endswith((".gate.weight", "router.weight", "router.layer.weight")):
        return rng.normal(0, 5 * shape[-1] ** -0.5, shape)  # large enough to avoid nearly equal choices
    if name.endswith("router.proj.weight"):
        return rng.normal(0, 5, shape)  # Gemma 4 divides by the root of the width
    if len(shape) == 1 or "bias" in name or "sinks" in name:
        return rng.normal(0, 0.2, shape)
    return rng.normal(0, shape[-1] ** -0.5, shape)


def write(path: Path, entry: Tiny, model: Any, type: str = "F32", **keys: Any) -> Path:
    """Write a model of transformers as a GGUF file, like ``localllm convert``, with additional ``keys``."""
    folder = save(path.with_suffix(".hf"), model)
    if entry.auto == "AutoModel":
        write_pooling(folder, "lasttoken" if entry.architecture == "qwen3" else "mean")
    checkpoint = Checkpoint(folder, entry.conversion)
    assert checkpoint.architecture == entry.architecture
    keys = {f"{entry.architecture}.{key}": value for key, value in keys.items()}
    checkpoint.metadata = read_back(folder, dict(checkpoint.metadata) | keys, ())
    path.unlink(missing_ok=True)
    list(run(plan(checkpoint, path, type)))
    return path


def write_target(folder: Path, name: str, likely: Sequence[int] | None) -> tuple[Path, Any]:
    """Write a tiny model for a drafter: its context is longer, and it writes only the ``likely`` tokens."""
    import torch

    entry = replace(TINY[name], config={**TINY[name].config, "max_position_embeddings": 256})
    model = make_model(entry)
    if likely is not None and not model.config.tie_word_embeddings:
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head[[i for i in range(len(head)) if i not in likely]] = 0
    return write(folder / "model.gguf", entry, model), model


def write_draft(folder: Path, type: str = "F32") -> Path:
    """Convert the drafter in a folder, for the model that `write_target` wrote there."""
    checkpoint = Checkpoint(folder / "drafter", target=Checkpoint(folder / "model.hf"))
    list(run(plan(checkpoint, folder / "drafter.gguf", type)))
    return folder / "drafter.gguf"


def write_pooling(folder: Path, mode: str) -> None:
    """Write a pooling configuration in sentence-transformers' format."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    setting = {"pooling_mode_mean_tokens": True} if mode == "mean" else {"pooling_mode": mode}  # old and new format
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(setting))


def save(folder: Path, model: Any) -> Path:
    """Save a model in transformers' format, in bfloat16, with a tokenizer."""
    import torch

    weights = {
        name: array.to(torch.bfloat16) if array.is_floating_point() else array
        for name, array in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.save_pretrained(folder, state_dict=weights)
    if model.release is not None:
        from safetensors.torch import load_file, save_file

        settings = json.loads((folder / "config.json").read_text())
        settings, tensors = model.release(settings, load_file(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, model.config.vocab_size)
    return folder
