"""A decoder-only transformer in a page of numpy, written from the papers, for Hugging Face's weights.

One sequence, float64, no cache, no packing, no code shared with the project.
Sources: arXiv:2302.13971 (Llama), arXiv:2104.09864 (rotary positions), arXiv:2305.13245 (grouped queries),
arXiv:2310.06825 (sliding window), arXiv:2401.04088 (mixture of experts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def logits(config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], ids: Sequence[int]) -> Array:
    """Return logits [T, n_vocab] of ``ids`` [T].  Tokens see each other if the configuration has ``causal`` false."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    x = w["model.embed_tokens.weight"][list(ids)]
    for i in range(config["num_hidden_layers"]):
        layer = {name.removeprefix(f"model.layers.{i}."): a for name, a in w.items() if f"layers.{i}." in name}
        x = x + _attention(config, layer, _norm(config, x, layer["input_layernorm.weight"]))
        mlp = _mixture if "mlp.gate.weight" in layer else _mlp
        x = x + mlp(config, layer, _norm(config, x, layer["post_attention_layernorm.weight"]))
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(config, x, w["model.norm.weight"]) @ head.T


def _norm(config: Mapping[str, Any], x: Array, weight: Array) -> Array:
    eps: float = config["rms_norm_eps"]
    root: Array = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return x / root * weight


def _linear(layer: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ layer[f"{name}.weight"].T + layer.get(f"{name}.bias", 0.0)


def _attention(config: Mapping[str, Any], layer: Mapping[str, Array], x: Array) -> Array:
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    q = _linear(layer, "self_attn.q_proj", x).reshape(len(x), n_heads, head_dim)
    k = _linear(layer, "self_attn.k_proj", x).reshape(len(x), n_kv_heads, head_dim)
    v = _linear(layer, "self_attn.v_proj", x).reshape(len(x), n_kv_heads, head_dim)
    if "self_attn.q_norm.weight" in layer:
        q = _norm(config, q, layer["self_attn.q_norm.weight"])
        k = _norm(config, k, layer["self_attn.k_norm.weight"])
    q, k = _rotate(config, q), _rotate(config, k)
    window = config.get("sliding_window") or len(x)
    out = np.empty_like(q)
    for head in range(n_heads):
        group = head * n_kv_heads // n_heads
        for t in range(len(x)):
            seen = range(max(0, t - window + 1), t + 1) if config.get("causal", True) else range(len(x))
            scores = [q[t, head] @ k[s, group] / head_dim**0.5 for s in seen]
            share = np.exp(scores) / np.exp(scores).sum()
            out[t, head] = share @ v[seen.start : seen.stop, group]
    return _linear(layer, "self_attn.o_proj", out.reshape(len(x), -1))


def _rotate(config: Mapping[str, Any], x: Array) -> Array:
    """Return heads [T, n, head_dim] as complex numbers, each rotated by its angle times its position."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * config["rope_theta"] ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _mlp(config: Mapping[str, Any], layer: Mapping[str, Array], x: Array) -> Array:
    gate = _linear(layer, "mlp.gate_proj", x)
    return _linear(layer, "mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(layer, "mlp.up_proj", x))


def _mixture(config: Mapping[str, Any], layer: Mapping[str, Array], x: Array) -> Array:
    out = np.zeros_like(x)
    for t, logits in enumerate(x @ layer["mlp.gate.weight"].T):
        chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[: config["num_experts_per_tok"]]
        weighed = chosen if config.get("norm_topk_prob", True) else range(len(logits))
        total = sum(np.exp(logits[expert]) for expert in weighed)
        for expert in chosen:
            gate, up = np.split(layer["mlp.experts.gate_up_proj"][expert] @ x[t], 2)
            y = layer["mlp.experts.down_proj"][expert] @ (gate / (1 + np.exp(-gate)) * up)
            out[t] += np.exp(logits[expert]) / total * y
    return out
