"""Nomic Embed (arXiv:2402.01613): BERT with rotated positions and gated MLPs."""

from __future__ import annotations

from localllm.models import bert
from localllm.models.hf_convert import encoder_keys

HF_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
HF_MEANT = {"activation_function": ("swiglu",), "mlp_type": (), "add_cross_attention": (False,)}
hf_keys, record = encoder_keys, bert.record
