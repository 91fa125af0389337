"""OLMo 2 and 3 (arXiv:2501.00656): norms after attention and MLP, and norms over complete rows of query and key.

In OLMo 3, three of four layers have a window. Only layers without a window have scaled rotary frequencies.
"""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import window_keys
from localllm.models.rope import make_local_rope, make_rope

hf_keys = window_keys


def record(m: Header) -> Graph:
    dim, windows = m.heads().key_dim, m.windows(period=4)
    rope, local_rope = make_rope(m, dim), make_local_rope(m, dim)
    ropes = [local_rope if window else rope for window in windows]
    return llama_like(m, ropes, windows=windows, pre_norms=False, post_norm_eps=m.norm_eps, qk_norm="row")
