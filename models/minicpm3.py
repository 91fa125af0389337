"""MiniCPM 3: DeepSeek's latent attention, and scales on embedding, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models import deepseek2
from localllm.models.blocks import Layer, add, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

#: Constants that files do not contain: factor of embeddings; factor of residuals, which is divided by the root of the
#: number of layers; and the width for which logits are not scaled.
EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH = 12.0, 1.4, 256


def hf_keys(config: Any) -> dict[str, Any]:
    scales = config.scale_emb, config.scale_depth, config.dim_model_base
    if scales != (EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH):
        raise ModelError(f"config.json has the scales {scales}, but GGUF files of MiniCPM 3 mean 12, 1.4 and 256")
    if (n := config.v_head_dim) not in (None, config.hidden_size // config.num_attention_heads):
        raise ModelError(f"config.json has v_head_dim = {n}, but GGUF files of MiniCPM 3 share the hidden width out")
    original = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    if original != config.max_position_embeddings:
        raise ModelError("config.json extends the context, which GGUF files of MiniCPM 3 have no key for")
    return {
        "vocab_size": config.vocab_size,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": None,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.type": None,
        "rope.scaling.original_context_length": None,
    }


def record(m: Header) -> Graph:
    n_ff, d, scaling = m.mlp_width(), m.config.n_embd, "longrope" if "rope_factors_long.weight" in m.weights else None
    n_rot = m.meta.read("rope.dimension_count", int, low=2, high=128)
    latents, rope = deepseek2.Latents.read(m, has_value_length=False), make_rope(m, n_rot, scaling=scaling)
    rope = replace(rope, first=latents.n_latent)
    scale = DEPTH_SCALE * m.config.n_layers**-0.5

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = deepseek2.latent_attention(at, norm(at, "attn_norm", x), latents, rope)
        x = add(at, y, x, scale)
        return add(at, gated_mlp(at, norm(at, "ffn_norm", x), n_ff), x, scale)

    return decoder(m, layer, embedding_scale=EMBEDDING_SCALE, logit_scale=BASE_WIDTH / d)
