"""LLaDA 8B and LLaDA 1.5 (arXiv:2502.09992): Llama's layers, whose tokens see each other. LLaDA-MoE
(arXiv:2509.24389) has OLMoE's experts and norms of heads. The models write by diffusion."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, expert_norm, head_dim, implied, interleave_pairs

#: Mask token of LLaDA-MoE. Its config.json does not contain this number.
MOE_MASK = 156_895

HF_MEANT: dict[str, tuple[Any, ...]] = (
    implied("activation_type", "silu")
    | implied("layer_norm_type", "rms")
    | implied("block_type", "llama")
    | implied("block_group_size", 1)
    | implied("rope rope_full_precision layer_norm_with_affine qk_layernorm", True)
    | implied("alibi attention_layer_norm input_emb_norm scale_logits bias_for_layer_norm", False)
    | implied("shared_expert_intermediate_size routed_scaling_factor", None, 0, 1.0)
    | implied("alibi_bias_max attention_layer_norm_with_affine dense_intermediate_size embedding_size")
    | implied("include_bias include_qkv_bias init_cutoff_factor init_fn mlp_ratio moe_layer_freq")
    | implied("multi_query_attention precision weight_tying")
)


def hf_keys(config: Any) -> dict[str, Any]:
    keys = {"attention.causal": False, ".diffusion.shift_logits": False}
    if "num_experts" not in config:
        return keys | {"rope.dimension_count": head_dim(config), "vocab_size": config.vocab_size}
    keys |= {"expert_feed_forward_length": config.expert_intermediate_size}
    return keys | {".tokenizer.ggml.mask_token_id": MOE_MASK} | expert_norm(config, usual=False)


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Reorder the rows of LLaDA's query and key to rotary pairs."""
    if "num_experts" in config:
        return array
    for matrix, n_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if name.endswith((f"{matrix}.weight", f"{matrix}.bias")):
            return interleave_pairs(array, n_heads)
    return array


def record(m: Header) -> Graph:
    if m.config.architecture == "llada":
        return llama_like(m, interleaved=True)
    return llama_like(m, experts=m.experts(norm_topk_prob=False), qk_norm="head")
