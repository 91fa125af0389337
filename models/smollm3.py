"""SmolLM3: Llama's layers, with no rotation in every fourth layer (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models import llama
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.rope import make_rope

hf_tensor = llama.hf_tensor


def hf_keys(config: Any) -> dict[str, Any]:
    period, n = config.no_rope_layer_interval, config.num_hidden_layers
    rotated = config.no_rope_layers or [int((i + 1) % period != 0) for i in range(n)]
    if list(map(int, rotated)) != [int((i + 1) % 4 != 0) for i in range(n)]:
        raise ModelError("config.json has other layers without rotation than every fourth, which GGUF files mean")
    return llama.hf_keys(config)


def record(m: Header) -> Graph:
    rope = make_rope(m, m.heads().key_dim, interleaved=True)
    return llama_like(m, [rope if (i + 1) % 4 else None for i in range(m.config.n_layers)])
