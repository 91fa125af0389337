"""Qwen 3 Next: as Qwen 3.5 with experts, but each key head's value heads are neighbours."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models import qwen35
from localllm.models.config import Header

HF_NAMES = qwen35.HF_NAMES | {"ssm_ba": "linear_attn.in_proj_ba"}


def record(m: Header) -> Graph:
    return qwen35.record_hybrid(m, is_grouped=True)
