"""InternLM 2 and 2.5 (arXiv:2403.17297): Llama's layers."""

from __future__ import annotations

from typing import Any

from localllm.models import llama
from localllm.models.hf_convert import Array, interleave_pairs

record = llama.record


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split [queries | key | value] of each group into three matrices, the first two in the order of rotary pairs."""
    if not name.endswith("wqkv.weight"):
        return array
    n, groups, d = config.num_attention_heads, config.num_key_value_heads, array.shape[-1]
    heads = array.reshape(groups, n // groups + 2, -1, d)
    q, k, v = (part.reshape(-1, d) for part in (heads[:, :-2], heads[:, -2], heads[:, -1]))
    parts = interleave_pairs(q, n), interleave_pairs(k, groups), v
    return {f"attn_{name}.weight": part for name, part in zip("qkv", parts, strict=True)}
