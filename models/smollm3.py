"""SmolLM3: Llama's layers, of which every fourth does not rotate (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models import hf_names, llama
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON
hf_keys, hf_tensor = llama.hf_keys, llama.hf_tensor


def record(m: Header) -> Graph:
    rope = make_rope(m, m.heads().key_dim, interleaved=True)
    return llama_like(m, [rope if (i + 1) % 4 else None for i in range(m.config.n_layers)])
