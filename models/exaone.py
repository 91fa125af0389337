"""EXAONE 3 and 3.5 (arXiv:2408.03541, 2412.04862): Llama's layers."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models import hf_names
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.GPT_2
    | {
        "attn_q": "attn.attention.q_proj",
        "attn_k": "attn.attention.k_proj",
        "attn_v": "attn.attention.v_proj",
        "attn_output": "attn.attention.out_proj",
        "ffn_gate": "mlp.c_fc_0",
        "ffn_up": "mlp.c_fc_1",
        "ffn_down": "mlp.c_proj",
    }
)
hf_keys = rotated_part


def record(m: Header) -> Graph:
    return llama_like(m, make_rope(m, m.heads().key_dim))
