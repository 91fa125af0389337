"""Hunyuan, dense and with experts (arXiv:2411.02265), and the text of HunyuanOCR: Llama's layers, with heads normed
after the rotation."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim
from localllm.models.rope import make_rope, stretched_base, with_axes

HF_MEANT = {"routed_scaling_factor": (False, 1.0), "num_shared_expert": (), "use_mla": (False,)}
HF_MEANT |= {"norm_topk_prob": (True,), "skip_cls_token": (), "use_mixed_mlp_moe": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    keys = _rope_keys(config)
    if config.model_type != "hunyuan_v1_moe":
        return keys
    used = config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]
    if len(set(used)) > 1:
        raise ModelError(f"config.json has moe_topk = {quoted(used)}, but GGUF files have one number for all layers")
    return keys | {
        "expert_used_count": used[0],
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def _rope_keys(config: Any) -> dict[str, Any]:
    """Return the rotation's keys. "dynamic" scaling stretches the base by a fixed factor, for a context of 256k."""
    rope = config.rope_parameters
    alpha, none = rope.get("alpha"), {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    if rope.get("rope_type") not in ("dynamic", "xdrope") or not alpha:
        return {}
    if "_vl" in config.model_type:
        # Numbers of frequencies for time, column, row and image.  Checkpoints may omit time.
        sections = rope.get("mrope_section") or rope.get("xdrope_section")
        sections = [0] * (4 - len(sections)) + list(sections) if sections else None
        context = config.max_position_embeddings
        keys = {"rope.scaling.alpha": alpha, "rope.dimension_sections": sections}
    else:
        context = 1 << 18
        keys = {"rope.freq_base": stretched_base(rope["rope_theta"], alpha, head_dim(config))}
    rope.skip("rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    return none | keys | {"context_length": context, "rope.scaling.original_context_length": context}


def record(m: Header) -> Graph:
    rope = make_rope(m, m.heads().key_dim, has_alpha=m.config.architecture == "hunyuan_vl")
    rope = with_axes(m, rope, order=(0, 2, 1, 3))  # time, column, row, number of the image
    return llama_like(m, rope, m.experts(), qk_norm="head", norm_last=True)
