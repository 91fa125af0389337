"""OLMo 2 and 3 (arXiv:2501.00656): norms after attention and MLP, and norms over complete rows of query and key.

In OLMo 3, three of four layers have a window. Only layers without a window have scaled rotary frequencies.
"""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import window_keys
from localllm.models.rope import make_local_rope, make_rope

hf_keys = window_keys


def record(m: Header) -> Graph:
    heads, n_ff, windows = m.heads(), m.mlp_width(), m.windows(period=4)
    rope, local_rope = make_rope(m, heads.key_dim), make_local_rope(m, heads.key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        window = windows[at.number]
        y = attention(at, x, heads, local_rope if window else rope, qk_norm="row", window=window)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, x, n_ff)
        return add(at, norm(at, "post_ffw_norm", y), x)

    return decoder(m, layer)
