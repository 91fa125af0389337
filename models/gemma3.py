"""Gemma 3 (arXiv:2503.19786): norms before and after attention and MLP, and normed heads. Five of six layers have a
window and separate rotary frequencies. Tokens of an image see each other in all layers. EmbeddingGemma
(arXiv:2509.20354) attends in both directions."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import decoder, llama_layer, read_softcap
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, add_one_to_norms, gemma_keys, periodic_windows
from localllm.models.rope import make_local_rope, make_rope

HF_MEANT = {"hidden_activation": GELU_TANH, "hidden_act": ()}
hf_tensor = add_one_to_norms


def hf_keys(config: Any) -> dict[str, Any]:
    return gemma_keys(config) | periodic_windows(config, 6)


def record(m: Header) -> Graph:
    heads, windows, d = m.heads(), m.windows(period=6), m.config.n_embd
    rope, local_rope = make_rope(m, heads.key_dim), make_local_rope(m, heads.key_dim, 10_000.0)
    if not m.is_causal:
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
    # Only for the scale, the 27B model (62 layers) divides the hidden width by the number of heads.
    scale = (d / heads.n if m.config.n_layers == 62 else heads.key_dim) ** -0.5
    ropes = [local_rope if window else rope for window in windows]
    options: Any = {"scale": scale, "has_spans": m.sees and m.is_causal, "qk_norm": "head"}
    layer = llama_layer(m, ropes, windows=windows, activation="gelu", post_norm_eps=m.norm_eps, **options)
    return decoder(m, layer, embedding_scale=d**0.5, softcap=read_softcap(m, "final_logit_softcapping"))
