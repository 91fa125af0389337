"""Gemma 3 (arXiv:2503.19786): norms before and behind both halves of a layer, heads normed, and of six layers five
see a window and rotate by frequencies of their own.  Tokens of a picture see each other in all layers.
EmbeddingGemma (arXiv:2509.20354) sees both ways."""

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, norm, read_softcap
from localllm.models.config import Header
from localllm.models.hf_convert import add_one_to_norms, gemma_keys
from localllm.models.rope import make_local_rope, make_rope

HF_NAMES = hf_names.COMMON | hf_names.HEAD_NORMS | hf_names.FOUR_NORMS
hf_keys, hf_tensor = gemma_keys, add_one_to_norms


def record(m: Header) -> Graph:
    heads, n_ff, windows, d = m.heads(), m.mlp_width(), m.windows(period=6), m.config.n_embd
    rope, local_rope = make_rope(m, heads.key_dim), make_local_rope(m, heads.key_dim, 10_000.0)
    causal = m.pooling is None
    if not causal:
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
    # The 27 B model, which has 62 layers, shares the hidden width out among the heads for this alone.
    scale = (d / heads.n if m.config.n_layers == 62 else heads.key_dim) ** -0.5

    def layer(at: Layer, x: Tensor) -> Tensor:
        window = windows[at.number]
        y = norm(at, "attn_norm", x)
        turned = local_rope if window else rope
        options: Any = {"scale": scale, "causal": causal, "has_spans": m.sees and causal}
        y = attention(at, y, heads, turned, qk_norm="head", window=window, **options)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), n_ff, activation="gelu")
        return add(at, norm(at, "post_ffw_norm", y), x)

    return decoder(m, layer, embedding_scale=d**0.5, softcap=read_softcap(m, "final_logit_softcapping"))
