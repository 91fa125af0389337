"""Jina Embeddings v2 (arXiv:2310.19923): BERT with ALiBi in both directions and gated MLPs.

The model for code has norms of query and key, and a second norm after attention. Its GGUF files can be read, but its
checkpoint cannot be converted.
"""

from __future__ import annotations

from typing import Any

from localllm.models import bert
from localllm.models.hf_convert import GELU, encoder_keys

HF_MEANT = {"hidden_act": GELU, "position_embedding_type": ("alibi",), "is_decoder": (False,)}
record = bert.record


def hf_keys(config: Any) -> dict[str, Any]:
    return encoder_keys(config) | {"rope.freq_base": None}
