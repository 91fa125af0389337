"""SmallThinker (arXiv:2507.20984): experts with ReLU gates, which are selected by the layer's input.

In models with windows, every fourth layer has no window and does not rotate.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, chosen_experts, decoder, norm, route
from localllm.models.config import Header
from localllm.models.hf_convert import implied
from localllm.models.rope import make_rope

HF_MEANT = (
    implied("moe_enable_early_router", True)
    | implied("moe_enable_secondary_experts", False)
    | implied("norm_topk_prob", True)
    | implied("hidden_act", "relu", "silu")  # ignored by the model's own code
    | implied("model_name sliding_window sliding_window_pattern")
    | implied("moe_layer_layout moe_num_secondary_experts moe_secondary_expert_size profile_sparsity")
)


def hf_keys(config: Any) -> dict[str, Any]:
    n = config.num_hidden_layers
    windows, rotates = (list(getattr(config, f"{name}_layout", None) or []) for name in ("sliding_window", "rope"))
    has_windows = any(windows)
    usual = [int(i % 4 != 0) if has_windows else 1 for i in range(n)]
    if (has_windows and windows != usual) or (rotates and rotates != usual):
        raise ModelError(
            "config.json has a sliding_window_layout or rope_layout that GGUF files of SmallThinker cannot describe: "
            "every fourth layer, starting with the first, must have neither a window nor a rotation"
        )
    window = config.sliding_window_size
    return {
        "attention.sliding_window": window if has_windows else None,
        "expert_count": config.moe_num_primary_experts,
        "expert_used_count": config.moe_num_active_primary_experts,
        "expert_feed_forward_length": config.moe_ffn_hidden_size,
        "feed_forward_length": config.moe_ffn_hidden_size,
        "expert_gating_func": 1 if getattr(config, "moe_primary_router_apply_softmax", False) else 2,
    }


def record(m: Header) -> Graph:
    heads, experts, rope = m.heads(), m.required_experts(), make_rope(m, m.heads().key_dim)
    windows = m.windows(period=4, first=True)
    has_windows = any(windows)

    def layer(at: Layer, x: Tensor) -> Tensor:
        routing, window = route(at, x, experts), windows[at.number]
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope if window or not has_windows else None, residual=x, window=window)
        return chosen_experts(at, norm(at, "ffn_norm", x), experts, routing, "relu", x)

    return decoder(m, layer)
