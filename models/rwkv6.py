"""RWKV 6 (arXiv:2404.05892), and QRWKV 6: Qwen 2.5 with gated linear attention instead of attention.

Each matrix of a recurrence reads a mixture of the token's and the previous token's values, whose shares depend on the
token.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Matrix, Tensor
from localllm.kernels.operations import (
    WKV,
    Activation,
    CausalConv,
    Columns,
    Gated,
    Linear,
    Linears,
    Scale,
    SideBySide,
)
from localllm.models.blocks import Layer, add, decoder, gated_mlp, layer_norm, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats, implied
from localllm.models.rwkv7 import head_norm, recurrent_keys, shifted
from localllm.models.tensor_names import LAYER
from localllm.models.weights import ArrayWeight, Reshaped, split_rows

#: Order of the mixtures in files, and their order in checkpoints of QRWKV.
_MIXTURES, _MIXTURES_OF_QWEN = "wkvrg", "rkvwg"

HF_NAMES = {"pre_norm": "token_embd_norm"}
HF_MEANT = (
    implied("attention_hidden_size head_size_divisor lora_rank_decay lora_rank_tokenshift max_position_embeddings")
    | implied("num_attention_heads rope_parameters rope_theta sliding_window max_window_layers model_version")
    | implied("rescale_every attention_bias attention_output_bias balance_state groupnorm_att use_rope")
)


def hf_keys(config: Any) -> dict[str, Any]:
    d, is_qwen = config.hidden_size, "num_attention_heads" in config
    wide = d >= 4096 if is_qwen else d == 4096
    extra = config.get("lora_rank_tokenshift") or (64 if wide else 32)
    keys = {
        "time_mix_extra_dim": extra,
        "time_decay_extra_dim": config.get("lora_rank_decay") or (128 if wide else 64),
    }
    if is_qwen:
        return (
            recurrent_keys(d // config.num_attention_heads)
            | keys
            | {
                "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
                "attention.head_count_kv": config.num_key_value_heads,
                "token_shift_count": 1,
            }
        )
    return (
        recurrent_keys(config.head_size)
        | keys
        | {
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "feed_forward_length": config.intermediate_size or int(d * 3.5) // 32 * 32,
            "rescale_every_n_layers": config.rescale_every,
        }
    )


def hf_tensor(name: str, array: Array, config: Any) -> Array | Mapping[str, Array]:
    """Transpose the pairs of matrices, and divide matrices of later layers. `hf_extra` joins the mixtures."""
    match = re.fullmatch(LAYER + "(.*)", name)
    if match is None:
        return array
    inner, every = match[2], config.get("rescale_every") or 0
    if re.fullmatch(r"(?:attention|self_attn)\.time_maa_[wkvrg]", inner):
        return {}
    if inner.endswith("time_maa_w1"):
        parts = array.T.reshape(5, -1, array.shape[0])
        return _ordered(parts, config).reshape(-1, array.shape[0])
    if inner.endswith("time_maa_w2"):
        return _ordered(array.transpose(0, 2, 1), config)
    if inner.endswith(("time_decay_w1", "time_decay_w2")):
        return array.T
    if inner.endswith("time_decay") or "time_maa" in inner:
        return array.reshape(-1)
    if every and inner in ("attention.output.weight", "feed_forward.value.weight"):
        return floats(array) / 2.0 ** (int(match[1]) // every)
    return array


def _ordered(parts: Array, config: Any) -> Array:
    """Return parts [5, ...] in the order of GGUF files."""
    if "num_attention_heads" not in config:
        return parts
    return parts[[_MIXTURES_OF_QWEN.index(letter) for letter in _MIXTURES]]


def hf_extra(config: Any) -> dict[str, Array]:
    """Join the shares of the previous token in each mixture to one tensor per layer."""
    shares: dict[str, dict[str, Array]] = defaultdict(dict)
    for name, tensor in config.tensors.items():
        match = re.fullmatch(LAYER + r"(?:attention|self_attn)\.time_maa_([wkvrg])", name)
        if match is not None:
            shares[match[1]][match[2]] = floats(tensor.values()).reshape(1, 1, 1, -1)
    return {
        f"blk.{layer}.time_mix_lerp_fused.weight": np.concatenate([rows[letter] for letter in _MIXTURES])
        for layer, rows in shares.items()
    }


@dataclass(frozen=True)
class DynamicMixSizes:
    """Sizes of a recurrence: heads of ``head_dim`` values, and widths between pairs of matrices."""

    head_dim: int
    n_kv: int  # heads of keys and values
    rank: int
    decay_rank: int

    @classmethod
    def read(cls, m: Header) -> DynamicMixSizes:
        dim = m.meta.read("wkv.head_size", int, low=1, high=1 << 12)
        m.meta.check_multiple("embedding_length", m.config.n_embd, "wkv.head_size", dim)
        n = m.config.n_embd // dim
        n_kv = m.meta.read("attention.head_count_kv", int, 0, low=0, high=n) or n
        m.meta.check_multiple("embedding_length", n, "attention.head_count_kv", n_kv)
        m.meta.skip("attention.head_count", "token_shift_count")  # 0, and a number that follows from the architecture
        ranks = (m.meta.read(f"time_{x}_extra_dim", int, low=1, high=1 << 16) for x in ("mix", "decay"))
        return cls(dim, n_kv, *ranks)


def mixtures(at: Layer, x: Tensor, rank: int) -> dict[str, Tensor]:
    """Return the input of each matrix: x plus a share of its difference from the previous token's values."""
    w, d = at.weights, at.n_embd
    y = shifted(at, x, w.require("time_mix_lerp_x.weight", d), 0, "shares")
    y = at.add(Activation(at.linear(y, "time_mix_w1", 5 * rank), "tanh"))
    kernel = ArrayWeight("difference", np.tile(np.array([1, -1], np.float32), (d, 1)))
    difference = at.add(CausalConv(x, kernel, at.graph.state("shift", 1, d)))
    whole = Reshaped(w.require("time_mix_w2.weight", 5, d, rank), (5 * d, rank))
    shares = Reshaped(w.require("time_mix_lerp_fused.weight", 5, 1, 1, d), (5 * d,))
    mixed = {}
    for i, matrix in enumerate(split_rows(Matrix(whole, shares), dict.fromkeys(_MIXTURES, d))):
        part = at.add(Columns(y, range(i * rank, (i + 1) * rank)))
        mixed[_MIXTURES[i]] = add(at, at.add(Gated(at.add(Linear(part, matrix)), difference, "identity")), x)
    return mixed


def _repeated(at: Layer, x: Tensor, name: str, sizes: DynamicMixSizes) -> Tensor:
    """Return keys or values of all heads: several heads share the rows of the matrix."""
    dim, n = sizes.head_dim, at.n_embd // sizes.head_dim
    if sizes.n_kv == n:
        return at.linear(x, name, at.n_embd)
    heads = {f"head {i}": dim for i in range(sizes.n_kv)}
    parts = at.add(Linears(x, split_rows(at.weights.matrix(name, at.n_embd, sizes.n_kv * dim), heads)))
    return at.add(SideBySide(tuple(part for part in parts for _ in range(n // sizes.n_kv))))


def time_mix(at: Layer, x: Tensor, sizes: DynamicMixSizes, residual: Tensor, *, is_qwen: bool) -> Tensor:
    w, d, n = at.weights, at.n_embd, at.n_embd // sizes.head_dim
    mixed = mixtures(at, x, sizes.rank)
    r, g = at.linear(mixed["r"], "time_mix_receptance", d), at.linear(mixed["g"], "time_mix_gate", d)
    k, v = _repeated(at, mixed["k"], "time_mix_key", sizes), _repeated(at, mixed["v"], "time_mix_value", sizes)
    decay = at.add(Activation(at.linear(mixed["w"], "time_mix_decay_w1", sizes.decay_rank), "tanh"))
    bias = w.require("time_mix_decay.weight", d)
    decay = at.add(Linear(decay, Matrix(w.require("time_mix_decay_w2.weight", d, sizes.decay_rank), bias)))
    state = at.graph.state("S", n, sizes.head_dim, sizes.head_dim)
    if is_qwen:
        (y,) = at.add(WKV(r, k, v, decay, state))
        y = at.add(Gated(g, at.add(Scale(y, sizes.head_dim**-0.5)), "sigmoid"))
    else:
        bonus = Reshaped(w.require("time_mix_first.weight", n, sizes.head_dim), (d,))
        y, of_bonus = at.add(WKV(r, k, v, decay, state, bonus=bonus))
        y = add(at, y, of_bonus)
        y = at.add(Gated(g, head_norm(at, y, sizes.head_dim), "silu"))
    return at.linear(y, "time_mix_output", d, residual=residual)


def channel_mix(at: Layer, x: Tensor, n_ff: int, residual: Tensor) -> Tensor:
    d = at.n_embd
    k, r = (
        shifted(at, x, at.weights.require(f"channel_mix_lerp_{letter}.weight", d), 0, f"mlp_{letter}")
        for letter in "kr"
    )
    y = at.add(Activation(at.linear(k, "channel_mix_key", n_ff), "relu2"))
    y = at.linear(y, "channel_mix_value", d)
    return add(at, at.add(Gated(at.linear(r, "channel_mix_receptance", d), y, "sigmoid")), residual)


def record(m: Header) -> Graph:
    sizes, n_ff, is_qwen = DynamicMixSizes.read(m), m.mlp_width(), m.meta.architecture == "rwkv6qwen2"
    record_norm, eps = (norm, m.norm_eps) if is_qwen else (layer_norm, m.layer_norm_eps)
    every = m.meta.read("rescale_every_n_layers", int, 0, low=0, high=1 << 16)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = time_mix(at, record_norm(at, "attn_norm", x), sizes, x, is_qwen=is_qwen)
        if is_qwen:
            return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)
        x = channel_mix(at, layer_norm(at, "attn_norm_2", x), n_ff, x)
        return at.add(Scale(x, 0.5)) if every and (at.number + 1) % every == 0 else x

    def embedding(at: Layer, x: Tensor) -> Tensor:
        return x if is_qwen else layer_norm(at, "token_embd_norm", x)

    return decoder(m, layer, change_embedding=embedding, output_norm=record_norm, norm_eps=eps)
