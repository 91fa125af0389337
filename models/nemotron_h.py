"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: each layer is one of Mamba 2, attention without rotation, and an MLP
or experts without gates."""

from __future__ import annotations

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, Mamba, attention, decoder, mamba, mixture, mlp, norm
from localllm.models.config import Header

HF_NAMES = hf_names.mamba("mixer") | {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.*.up_proj",
    "ffn_down_exps": "mixer.experts.*.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def record(m: Header) -> Graph:
    meta, heads, net, experts = m.meta, m.heads_by_layer(), Mamba.read(m.meta), m.experts(gating=2)
    widths = meta.read_each("feed_forward_length", m.config.n_layers, int, low=0, high=1 << 24)
    for key in ("moe_latent_size", "rope.dimension_count", "rope.freq_base"):  # of the tensors; and of no use here
        meta.find(key)
    eps = meta.read("attention.layer_norm_epsilon", float, 0.0, low=0.0, high=1.0)
    eps = meta.read("attention.layer_norm_rms_epsilon", float, eps, low=0.0, high=1.0)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, n_ff, own_heads = norm(at, "attn_norm", x), widths[at.number], heads[at.number]
        if n_ff and own_heads:
            raise ModelError(
                f"{meta.architecture}.feed_forward_length and {meta.architecture}.attention.head_count_kv both give "
                f"layer {at.number} a width, but it can have only one: the file is broken"
            )
        if n_ff and experts:
            return mixture(at, y, experts, activation="relu2", residual=x)
        if n_ff:
            return mlp(at, y, n_ff, activation="relu2", residual=x)
        return attention(at, y, own_heads, None, residual=x) if own_heads else mamba(at, y, net, residual=x)

    return decoder(m, layer, norm_eps=eps)
