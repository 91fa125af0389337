"""GLM-4 (0414) and GLM-Z1: norms before and after attention and MLP, and a rotation of half of each head."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, axes_keys, rotated_part
from localllm.models.rope import make_rope, with_axes


def hf_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | axes_keys(config)


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """If frequencies have several axes, reorder rotary pairs, which are halves of a head's rotated part."""
    is_rotated = "q_proj." in name or "k_proj." in name
    if not (is_rotated and config.rope_parameters.get("mrope_section")):
        return array
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n = rotated_part(config)["rope.dimension_count"]
    order = [*range(0, n, 2), *range(1, n, 2), *range(n, head_dim)]
    return array.reshape(-1, head_dim, *array.shape[1:])[:, order].reshape(array.shape)


def record(m: Header) -> Graph:
    # Models with images rotate by several axes, which are equal for text, and their rows have a different order.
    has_axes = any(m.meta.find("rope.dimension_sections") or ())
    rope = with_axes(m, make_rope(m, m.heads().key_dim, interleaved=not has_axes), in_turn=False)
    return llama_like(m, rope, post_norm_eps=m.norm_eps)
