"""DeepSeek MoE 16B (arXiv:2401.06066), and the text of DeepSeek-OCR: Llama's layers, with experts and shared
experts after the first layers. The experts' weights are not divided by their sum.

Rotary pairs are adjacent in files of DeepSeek MoE, and in the order of the checkpoint in files of DeepSeek-OCR.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, interleave_query_and_key, rotated_part, unscaled

HF_MEANT = {
    "topk_method": ("greedy",),
    "scoring_func": ("softmax",),
    "n_group": (1,),
    "topk_group": (1,),
    "sliding_window": (),  # of Unlimited-OCR, for generated tokens only
}


def _is_ocr(config: Any) -> bool:
    return str(config.model_type) != "deepseek"


def hf_keys(config: Any) -> dict[str, Any]:
    kinds = getattr(config, "mlp_layer_types", None)
    n_dense = kinds.count("dense") if kinds else getattr(config, "first_k_dense_replace", None)
    keys = rotated_part(config) | ({} if _is_ocr(config) else unscaled(config))
    return keys | {
        "vocab_size": config.vocab_size,
        "leading_dense_block_count": n_dense or 0,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": getattr(config, "routed_scaling_factor", 1.0),
        "expert_weights_norm": getattr(config, "norm_topk_prob", None) or None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    return array if _is_ocr(config) else interleave_query_and_key(name, array, config)


def record(m: Header) -> Graph:
    is_ocr = m.config.architecture == "deepseek2-ocr"
    if is_ocr:
        m.meta.skip("attention.sliding_window")  # of Unlimited-OCR, whose decoder does not use it
    return llama_like(m, experts=m.experts(norm_topk_prob=False), interleaved=not is_ocr)
