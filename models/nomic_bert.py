"""Nomic Embed (arXiv:2402.01613): BERT with rotated positions and gated MLPs."""

from __future__ import annotations

from localllm.models import bert
from localllm.models.hf_convert import encoder_keys

HF_MEANT = {"activation_function": ("swiglu",), "mlp_type": ()}
hf_keys, record = encoder_keys, bert.record
