"""Jina Embeddings v3 (arXiv:2409.10173): BERT with rotated positions; its adapters are separate files."""

from __future__ import annotations

from localllm.models import bert, nomic_bert
from localllm.models.hf_convert import GELU, encoder_keys

HF_NAMES = nomic_bert.HF_NAMES | {
    "attn_qkv": "mixer.Wqkv",
    "attn_output": "mixer.out_proj",
    "ffn_up": "mlp.fc1",
    "dense_2": "linear",  # of Jina ColBERT v2
}
HF_MEANT = {"hidden_act": GELU, "add_cross_attention": (False,), "is_decoder": (False,)}
hf_keys, record = encoder_keys, bert.record
