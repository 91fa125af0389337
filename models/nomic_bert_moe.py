"""Nomic Embed v2 (arXiv:2502.07972): BERT with rotated positions, and experts in every second layer.

GGUF files in llama.cpp's format lack the bias that the model adds to the output of the experts, so vectors differ a
little from the vectors of the model.
"""

from __future__ import annotations

from typing import Any

from localllm.models import bert
from localllm.models.hf_convert import Array, encoder_keys, implied

HF_MEANT = (
    implied("activation_function", "gelu")
    | implied("causal prenorm rotary_emb_interleaved use_rms_norm", False)
    | implied("rotary_emb_fraction", 1.0)
    | implied("expert_choice_router ffn_div rotary_emb_scale_base moe_impl moe_normalize_expert_weights", None, False)
    | implied(
        "mlp_type num_shared_experts router_aux_loss_coef rotary_scaling_factor rotary_emb_base moe_resid_pdrop"
    )
)
record = bert.record


def hf_keys(config: Any) -> dict[str, Any]:
    n = config.n_positions
    return encoder_keys(config) | {
        "context_length": 512 if n == 2048 else n,  # the length of the training
        "moe_every_n_layers": config.moe_every_n_layers,
        "expert_count": config.num_experts,
        "expert_used_count": config.moe_top_k,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split the experts' matrices, which are stored as [experts * width, hidden width]."""
    if name.endswith("mlp.experts.bias"):
        return {}
    if not name.endswith(("experts.mlp.w1", "experts.mlp.w2")):
        return array
    experts = array.reshape(config.num_experts, -1, array.shape[-1])
    if name.endswith("w1"):
        return {"ffn_up_exps.weight": experts}
    return {"ffn_down_exps.weight": experts.swapaxes(1, 2)}
