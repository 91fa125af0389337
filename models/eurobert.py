"""EuroBERT (arXiv:2503.05500): Llama's layers, whose tokens see each other in both directions."""

from __future__ import annotations

from typing import Any

from localllm.models.blocks import llama_like
from localllm.models.hf_convert import unscaled

record = llama_like


def hf_keys(config: Any) -> dict[str, Any]:
    return unscaled(config) | {"attention.causal": False}
