"""EXAONE 3 and 3.5 (arXiv:2408.03541, 2412.04862): Llama's layers."""

from __future__ import annotations

from localllm.models.blocks import llama_like
from localllm.models.hf_convert import rotated_part

hf_keys, record = rotated_part, llama_like
