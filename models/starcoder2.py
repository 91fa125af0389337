"""StarCoder 2 (arXiv:2402.19173): LayerNorm in place of RMSNorm, biases everywhere, and an MLP without a gate.

The models were trained with a window of 4096 tokens, but their files do not contain it. As in llama.cpp, a token sees
all positions.
"""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import gpt_like
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH
from localllm.models.rope import make_rope

HF_MEANT = {"activation_function": (), "hidden_act": GELU_TANH}


def record(m: Header) -> Graph:
    return gpt_like(m, make_rope(m, m.heads().key_dim), activation="gelu", qkv_bias=True)
