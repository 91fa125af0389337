"""Gemma 2 (arXiv:2408.00118): norms before and behind both halves of a layer, soft-caps on scores and logits, and
every other layer sees a window."""

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, norm, read_softcap
from localllm.models.config import Header
from localllm.models.hf_convert import add_one_to_norms, gemma_keys
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | hf_names.FOUR_NORMS
hf_tensor = add_one_to_norms


def hf_keys(config: Any) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: getattr(config, name, None) for name in names} | gemma_keys(config)


def record(m: Header) -> Graph:
    heads, n_ff, windows, d = m.heads(), m.mlp_width(), m.windows(period=2, default=4096), m.config.n_embd
    rope, softcap = make_rope(m, heads.key_dim), read_softcap(m, "attn_logit_softcapping")
    # The 27 B model, which has 46 layers, shares the hidden width out among the heads for this alone.
    scale = (d / heads.n if m.config.n_layers == 46 else heads.key_dim) ** -0.5

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        y = attention(at, y, heads, rope, window=windows[at.number], scale=scale, softcap=softcap)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), n_ff, activation="gelu")
        return add(at, norm(at, "post_ffw_norm", y), x)

    return decoder(m, layer, embedding_scale=d**0.5, softcap=read_softcap(m, "final_logit_softcapping"))
