"""Dream 7B (arXiv:2508.15487): Qwen 2.5's layers, whose tokens see each other. It writes by diffusion."""

from __future__ import annotations

from typing import Any

from localllm.models.blocks import llama_like

record = llama_like


def hf_keys(config: Any) -> dict[str, Any]:
    return {"attention.causal": False}
