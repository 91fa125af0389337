"""Talkie 1930 13B: norms without weights, a gain per head of queries, and each layer adds a part of the embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import RMSNorm, Scale
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats
from localllm.models.rope import make_rope

HF_NAMES = {
    "embed": "token_embd",
    "attn.attn_query": "attn_q",
    "attn.attn_key": "attn_k",
    "attn.attn_value": "attn_v",
    "attn.attn_resid": "attn_output",
    "mlp.mlp_gate": "ffn_gate",
    "mlp.mlp_linear": "ffn_up",
    "mlp.mlp_resid": "ffn_down",
}
#: GGUF's names of gains, by the end of their names in checkpoints.
_GAINS = {
    "attn.head_gain.head_g": "attn_q_norm.weight",
    "attn_gain.a_g": "attn_output.scale",
    "mlp_gain.a_g": "ffn_down.scale",
    "embed_skip.a_g": "layer_output_scale.weight",
}


def hf_keys(config: Any) -> dict[str, Any]:
    (gain,) = (tensor for name, tensor in config.tensors.items() if name.endswith("lm_head_gain.w_g"))
    width = getattr(config, "intermediate_size", None) or round(8 / 3 * config.hidden_size / 128) * 128
    return {
        "feed_forward_length": width,
        "attention.head_count_kv": None,
        # The model's code passes no epsilon to torch's function, whose default is this.
        "attention.layer_norm_rms_epsilon": float(np.finfo(np.float32).eps),
        "logit_scale": float(floats(gain.values()).reshape(())),
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Rename the gains. Negate the second half of each head's query and key, because the model rotates backwards."""
    if name.endswith("lm_head_gain.w_g"):
        return {}
    for theirs, ours in _GAINS.items():
        if name.endswith(theirs):
            return {ours: array[:, None] if ours == "attn_q_norm.weight" else array}
    if not name.endswith(("attn_query.weight", "attn_key.weight")):
        return array
    heads = floats(array).reshape(-1, 2, config.head_dim // 2, array.shape[-1])
    return (heads * np.array([1, -1], np.float32)[:, None, None]).reshape(array.shape)


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)

    def norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return at.add(RMSNorm(x, None, at.norm_eps))

    def scaled(at: Layer, name: str, x: Tensor) -> Tensor:
        return at.add(Scale(x, weight=at.weights.require(name, 1)))

    def layer(at: Layer, x: Tensor) -> Tensor:
        # Unweighted norms of complete heads give the same result before and after the rotation.
        y = attention(at, norm(at, "", x), heads, rope, qk_norm="by head")
        x = add(at, scaled(at, "attn_output.scale", y), x)
        x = add(at, scaled(at, "ffn_down.scale", gated_mlp(at, norm(at, "", x), n_ff)), x)
        return add(at, scaled(at, "layer_output_scale.weight", at.embedding), x)

    return decoder(
        m,
        layer,
        change_embedding=lambda at, x: norm(at, "", x),
        output_norm=norm,
        logit_scale=m.meta.read("logit_scale", float, low=-1e6, high=1e6),
    )
