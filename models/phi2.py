"""Phi 1, 1.5 and 2 (arXiv:2309.05463): attention and MLP in parallel after one LayerNorm, and biases everywhere."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import gpt_like
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, parallel_keys
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": GELU_TANH}
hf_keys = parallel_keys


def record(m: Header) -> Graph:
    return gpt_like(m, make_rope(m, m.heads().key_dim), activation="gelu", qkv_bias=True, is_parallel=True)
