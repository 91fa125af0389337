"""PLM 1.8B (arXiv:2503.12167): DeepSeek's latent attention, and an MLP with squared ReLU and no gate."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import deepseek2
from localllm.models.blocks import Layer, decoder, mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import implied

HF_MEANT = implied("hidden_act", "relu2") | implied("q_lora_rank", None)


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def record(m: Header) -> Graph:
    n_ff, latents = m.mlp_width(), deepseek2.Latents.read(m)
    rope, _ = deepseek2.make_latent_rope(m)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = deepseek2.latent_attention(at, norm(at, "attn_norm", x), latents, rope, residual=x)
        return mlp(at, norm(at, "ffn_norm", x), n_ff, activation="relu2", residual=x)

    return decoder(m, layer)
