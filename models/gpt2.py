"""GPT-2, and StarCoder (arXiv:2305.06161), whose heads share one of keys and values: learned embeddings of positions,
LayerNorm, and biases everywhere."""

from __future__ import annotations

import re
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models.blocks import gpt_like, position_embedding
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, Array

HF_MEANT = {"activation_function": GELU_TANH}
_ABSENT = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")


def hf_keys(config: Any) -> dict[str, Any]:
    width = getattr(config, "n_inner", None) or 4 * config.hidden_size
    keys = {"feed_forward_length": width} | dict.fromkeys(_ABSENT)
    if config.model_type == "gpt2":
        return keys
    if not config.multi_query:
        raise ModelError("config.json has multi_query = false, but GGUF files of StarCoder mean true")
    return keys | {"attention.head_count_kv": 1}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Transpose GPT-2's matrices, which are stored as [inputs, outputs]."""
    return array.T if config.model_type == "gpt2" and re.search(r"c_\w+\.weight", name) else array


def record(m: Header) -> Graph:
    return gpt_like(m, None, activation="gelu", change_embedding=position_embedding(m))
