"""Jina Embeddings v3 (arXiv:2409.10173): BERT with rotated positions; its adapters are separate files."""

from __future__ import annotations

from localllm.models import bert
from localllm.models.hf_convert import GELU, encoder_keys

HF_MEANT = {"hidden_act": GELU, "is_decoder": (False,)}
hf_keys, record = encoder_keys, bert.record
