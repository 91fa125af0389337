"""Llama 1 to 3.x, Mistral, TinyLlama, SmolLM and their kin (arXiv:2302.13971)."""

from __future__ import annotations

from localllm.kernels.ops import CacheShape
from localllm.models.blocks import Attention, GatedMLP, Model, RMSNorm
from localllm.models.config import ModelConfig
from localllm.models.rope import make_rope
from localllm.models.weights import Weights


def build(config: ModelConfig, weights: Weights) -> Model:
    rope = make_rope(config, weights, interleaved=True)
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layers = []
    for i in range(config.n_layers):
        w = weights.layer(i)
        attention = Attention(
            layer=i,
            norm=RMSNorm(w.vector("attn_norm", config.n_embd), config.norm_eps),
            query=w.linear("attn_q", config.n_embd, q_width),
            key=w.linear("attn_k", config.n_embd, kv_width),
            value=w.linear("attn_v", config.n_embd, kv_width),
            output=w.linear("attn_output", q_width, config.n_embd),
            rope=rope,
            scale=config.head_dim**-0.5,
            window=config.sliding_window,
        )
        mlp = GatedMLP(
            norm=RMSNorm(w.vector("ffn_norm", config.n_embd), config.norm_eps),
            gate=w.linear("ffn_gate", config.n_embd, config.n_ff),
            up=w.linear("ffn_up", config.n_embd, config.n_ff),
            down=w.linear("ffn_down", config.n_ff, config.n_embd),
        )
        layers.append((attention, mlp))
    return Model(
        config=config,
        embedding=weights.embedding("token_embd", config.n_vocab, config.n_embd),
        layers=layers,
        norm=RMSNorm(weights.vector("output_norm", config.n_embd), config.norm_eps),
        head=weights.linear("output", config.n_embd, config.n_vocab, tied_to="token_embd"),
        cache_shape=CacheShape(config.n_layers, config.n_kv_heads, config.head_dim),
    )
