"""Chameleon (arXiv:2405.09818), text: Llama's layers with a LayerNorm of each head of query and key.

In the 30B model, the norms follow attention and MLP ("swin norm").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, implied, interleave_pairs, interleave_query_and_key
from localllm.models.rope import make_rope
from localllm.models.weights import ArrayWeight

HF_MEANT = implied("image_token_id model_parallel_size vocabulary_map vq_config")
#: Start of the names of tokens for parts of images, which the model must not write.
IMAGE_TOKEN = "IMGIMG"
#: Epsilon of the norms of heads, for which files have no key.
HEAD_EPS = 1e-5


def hf_keys(config: Any) -> dict[str, Any]:
    return {"swin_norm": bool(getattr(config, "swin_norm", False))}


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name.startswith("model.vqmodel."):
        return {}
    if name.endswith(("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")):
        return interleave_pairs(array.reshape(-1), len(array)).reshape(array.shape)
    return interleave_query_and_key(name, array, config)


def image_bias(m: Header) -> ArrayWeight | None:
    """Return a bias of logits [n_vocab] that excludes the tokens of images, or None without such tokens."""
    tokens = m.meta.values.get("tokenizer.ggml.tokens") or ()
    is_image = np.array([isinstance(token, str) and token.startswith(IMAGE_TOKEN) for token in tokens])
    return (
        ArrayWeight("image tokens", np.where(is_image, np.float32(-1e30), np.float32(0))) if is_image.any() else None
    )


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim, interleaved=True)
    is_swin = m.meta.read("swin_norm", bool, False)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = x if is_swin else norm(at, "attn_norm", x)
        y = attention(at, y, heads, rope, residual=None if is_swin else x, qk_norm="layer by head")
        x = add(at, norm(at, "attn_norm", y), x) if is_swin else y
        if not is_swin:
            return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)
        return add(at, norm(at, "ffn_norm", gated_mlp(at, x, n_ff)), x)

    return decoder(m, layer, logit_bias=image_bias(m))
