"""Defaults of configuration classes, by ``model_type``: checkpoints omit settings with their default value.

tests/benchmarks/class_defaults.py writes ``defaults.json``, the defaults of transformers' classes.
"""

# fmt: off
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("defaults.json")
#: defaults: settings by type; names: other names of settings by type, in pairs; text_types, encoder_types: the types
#: of the parts of models that also see or hear.
_TABLES: dict[str, Any] = json.loads(PATH.read_text("utf-8"))

_KIMI_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
NAMES: dict[str, Any] = _TABLES["names"] | {
    "llada": [
        *(["hidden_size", "d_model"], ["num_attention_heads", "n_heads"], ["num_key_value_heads", "n_kv_heads"]),
        *(["num_hidden_layers", "n_layers"], ["intermediate_size", "mlp_hidden_size"]),
        ["max_position_embeddings", "max_sequence_length"],
    ],
    "mamba2": [["num_heads"], ["num_attention_heads"]],
    "nomic_bert": [["intermediate_size", "n_inner"], ["layer_norm_eps", "layer_norm_epsilon"]],
    "kimi_k25_vision": [
        *([name, f"vt_{name}"] for name in _KIMI_SIZES),
        *([f"pos_emb_{axis}", f"init_pos_emb_{axis}"] for axis in ("height", "width", "time")),
    ],
}

#: Types of encoders, by ``model_type`` and section.
ENCODER_TYPES: dict[str, str] = _TABLES["encoder_types"] | {
    f"{name}/vision_config": "siglip2_vision_model" for name in ("phi4-siglip", "youtu_vl")
}

#: Defaults of image processors by class, and classes by the model's ``model_type``.
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = _TABLES["processors"]
PROCESSOR_TYPES: dict[str, str] = _TABLES["processor_types"] | {"deepseek_vl_v2": "DeepseekOcr2ImageProcessor"}

#: Types whose classes are not in transformers, or have other names there.
LIKE: dict[str, str] = _TABLES["text_types"] | {
    "kimi_k2": "deepseek_v3", "llama_bidirec": "llama", "mimo_v2": "mimo_v2_flash", "phi4-siglip": "phi3",
}

#: Classes that come with the checkpoints.
_REMOTE: dict[str, dict[str, Any]] = {
    "baichuan": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
    "bailing_moe": {"first_k_dense_replace": 0, "n_shared_experts": 0, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
                    "max_position_embeddings": 16384},
    "deci": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "nemotron-nas": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "codeshell": {"layer_norm_epsilon": 1e-5, "n_positions": 8192, "num_query_groups": 1},
    "deepseek": {
        "first_k_dense_replace": 0, "moe_layer_freq": 1, "norm_topk_prob": False, "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "n_shared_experts": 0,
        "max_position_embeddings": 2048,
    },
    "internlm2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "minicpm": {
        "dim_model_base": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "scale_depth": 1, "scale_emb": 1,
    },
    "nanbeige": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "NemotronH_Nano_VL_V2": {  # with the sizes of RADIO 2.5 H
        "downsample_ratio": 0.5, "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16,
        "num_hidden_layers": 32,
    },
    "neobert": {"norm_eps": 1e-6},
    "openelm": {
        "activation_fn_name": "swish", "ffn_dim_divisor": 256, "ffn_with_glu": True, "head_dim": 128,
        "max_context_length": 2048, "model_dim": 2048, "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True, "rope_freq_constant": 10_000,
    },
    "orion": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "PanguEmbedded": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 16_000_000.0},
    "qwen": {"layer_norm_epsilon": 1e-6, "rotary_emb_base": 10_000, "rotary_pct": 1.0},
    "smallthinker": {
        "head_dim": 128, "max_position_embeddings": 131072, "moe_ffn_hidden_size": 768, "rms_norm_eps": 1e-6,
        "moe_num_active_primary_experts": 4, "moe_num_primary_experts": 32, "rope_theta": 1e6,
        "sliding_window_size": 4096, "tie_word_embeddings": True,
    },
    "spark2_5": {
        "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5_000_000, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 10_000, "partial_rotary_factor": 1.0},
        },
    },
    "youtu_vl": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 8, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "rope_theta": 100_000.0, "rope_interleave": True, "hidden_act": "silu",
    },
    "xverse": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
}

DEFAULTS: dict[str, dict[str, Any]] = _REMOTE | _TABLES["defaults"]
