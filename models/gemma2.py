"""Gemma 2 (arXiv:2408.00118): norms before and after attention and MLP, soft-caps on scores and logits, and a
window in every second layer."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import decoder, llama_layer, read_softcap
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, add_one_to_norms, gemma_keys, periodic_windows

HF_MEANT = {"hidden_activation": GELU_TANH, "hidden_act": (), "sliding_window_size": ()}
hf_tensor = add_one_to_norms


def hf_keys(config: Any) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: getattr(config, name, None) for name in names} | gemma_keys(config) | periodic_windows(config, 2)


def record(m: Header) -> Graph:
    heads, d, softcap = m.heads(), m.config.n_embd, read_softcap(m, "attn_logit_softcapping")
    # Only for the scale, the 27B model (46 layers) divides the hidden width by the number of heads.
    scale = (d / heads.n if m.config.n_layers == 46 else heads.key_dim) ** -0.5
    options: Any = {"post_norm_eps": m.norm_eps, "activation": "gelu", "scale": scale, "softcap": softcap}
    layer = llama_layer(m, windows=m.windows(period=2, default=4096), **options)
    return decoder(m, layer, embedding_scale=d**0.5, softcap=read_softcap(m, "final_logit_softcapping"))
