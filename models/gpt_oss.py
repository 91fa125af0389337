"""gpt-oss (arXiv:2508.10925): attention with sinks, a window in every second layer, and experts with biases and
a clamped activation."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, periodic_windows
from localllm.models.rope import make_rope

HF_NAMES = {f"mlp.experts.{x}_proj_bias": f"ffn_{x}_exps.bias" for x in ("gate_up", "down")}
HF_MEANT = {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}


def hf_keys(config: Any) -> dict[str, Any]:
    if config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters.get("truncate", True):
        raise ModelError("config.json's rope_scaling truncates, which GGUF files of gpt-oss do not")
    return periodic_windows(config, 2) | {"expert_feed_forward_length": config.intermediate_size}


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split gate and up, whose rows alternate. Matrices are [inputs, outputs], except in MXFP4 ("blocks")."""
    if "experts." not in name:
        return array
    array = array if name.endswith(("bias", "blocks")) else array.swapaxes(1, 2)
    if "gate_up" not in name:
        return array
    kind = "bias" if name.endswith("bias") else "weight"
    return {f"ffn_gate_exps.{kind}": array[:, ::2], f"ffn_up_exps.{kind}": array[:, 1::2]}


def record(m: Header) -> Graph:
    return llama_like(
        m,
        make_rope(m, m.heads().key_dim, rounds_ramp=False),
        m.experts(),
        windows=m.windows(period=2, default=None),
        ffn_norm="post_attention_norm",
        activation="clamped_swiglu",
        qkv_bias=True,
        has_sinks=True,
    )
