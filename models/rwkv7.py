"""RWKV 7 (arXiv:2503.14456), and ARWKV (arXiv:2501.15570): Qwen 2.5 with RWKV 7's recurrence instead of attention.

Each matrix of a layer reads a mixture of the token's and the previous token's values. The values of later layers are
mixed with the first layer's values.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Tensor, Weight
from localllm.kernels.operations import WKV, Activation, CausalConv, Gated, LayerNorm, Linear
from localllm.models.blocks import Layer, add, decoder, gated_mlp, layer_norm, norm
from localllm.models.config import Header
from localllm.models.hf_convert import SILU, Array, floats, implied
from localllm.models.tensor_names import LAYER
from localllm.models.weights import TokenShift

#: Epsilon of the norm of each head. GGUF files have no key for this value.
HEAD_NORM_EPS = 64e-5
#: Order of the mixtures in ``time_mix_lerp_fused``. Models without a gate have no mixture "g".
_MIXTURES = "rwkvag"
#: Keys of the widths between two matrices, by the letter in the names of the matrices.
_RANKS = {"w": "decay", "a": "iclr", "v": "value_residual_mix", "g": "gate"}

#: GGUF's names of matrices, by the letter in the names of RWKV 7's checkpoints.
_PROJECTIONS = {"r": "receptance", "k": "key", "v": "value", "o": "output"}
_NAMES = {f"{letter}_proj": name for letter, name in _PROJECTIONS.items()} | {"g_norm": "ln", "ln_x": "ln"}
HF_NAMES = {
    "pre_norm": "token_embd_norm",
    "ffn_norm": "attn_norm_2",
    "ffn.x_k": "channel_mix_lerp_k",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}
#: Start of the names of a recurrence's tensors in a layer: RWKV 7's, and ARWKV's.
_RECURRENCE = r"(?:attn|self_attn\.time_mixer)\."
HF_MEANT = (
    implied("attn_mode fuse_cross_entropy fuse_linear_cross_entropy fuse_norm head_size_divisor hidden_ratio")
    | implied("max_position_embeddings num_attention_heads num_heads num_key_value_heads num_wkv_heads rope_theta")
    | implied("rope_parameters use_l2warp value_dim wkv_has_group_norm")
    | implied("hidden_act", "sqrelu", *SILU)
    | implied("norm_bias norm_first", True)
    | implied("wkv_layers", "full")
    | implied("wkv_version", 7)
    | implied("attn", None)
)


def hf_keys(config: Any) -> dict[str, Any]:
    if "wkv_version" in config:  # ARWKV, whose code has constants
        has_gate = config.wkv_has_gate
        ranks = {"decay": 64, "iclr": 64, "value_residual_mix": 32, "gate": 128 if has_gate else 0}
        return recurrent_keys(config.head_size) | {
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "token_shift_count": 1,
            **{f"attention.{key}_lora_rank": rank for key, rank in ranks.items()},
        }
    dim, eps = config.head_dim, config.norm_eps
    if not math.isclose(dim * eps, HEAD_NORM_EPS):
        raise ModelError(f"config.json has head_dim {dim} times norm_eps {eps}, but GGUF files mean {HEAD_NORM_EPS}")
    names = {"decay": "decay", "iclr": "a", "value_residual_mix": "v", "gate": "gate"}
    return recurrent_keys(dim) | {
        "feed_forward_length": config.intermediate_size or 4 * config.hidden_size,
        "attention.layer_norm_epsilon": eps,
        **{f"attention.{key}_lora_rank": config[f"{name}_low_rank_dim"] for key, name in names.items()},
    }


def recurrent_keys(head_dim: int) -> dict[str, Any]:
    """Return the keys that RWKV's converters write for every model."""
    absent = ("head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon", "layer_norm_epsilon")
    return {f"attention.{name}": None for name in absent} | {
        "rope.freq_base": None,
        "context_length": 1 << 20,  # no limit; the value of llama.cpp's converter
        "attention.head_count": 0,
        "wkv.head_size": head_dim,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | Mapping[str, Array]:
    """Rename the tensors of a recurrence. `hf_extra` joins the mixtures."""
    match = re.fullmatch(LAYER + _RECURRENCE + "(.*)", name)
    if match is None or match[2].startswith("x_"):
        return array if match is None else {}
    is_first, inner = match[1] == "0", match[2]
    pair = re.fullmatch(r"([wavg])(?:_lora\.lora\.([02])\.(weight|bias)|([012]))", inner)
    if pair is None:
        stem, _, suffix = inner.partition(".")
        return {f"time_mix_{_NAMES.get(stem, stem)}.{suffix or 'weight'}": array if suffix else array.reshape(-1)}
    letter, place, kind, number = pair.groups()
    if number is None:
        number = "0" if kind == "bias" else "1" if place == "0" else "2"
    elif number != "0":
        array = array.reshape(array.shape[-2:]).T  # ARWKV's matrices are stored as [inputs, outputs]
    if number == "0":
        array = array.reshape(-1)
    if is_first and letter == "v":
        return {}  # unused
    # llama.cpp requires these tensors in the first layer, and does not use them.
    copy = {f"time_mix_v{number}.weight": array} if is_first and letter == "a" else {}
    return {f"time_mix_{letter}{number}.weight": array} | copy


def hf_extra(config: Any) -> dict[str, Array]:
    """Join the shares of the previous token in each mixture to one tensor per layer."""
    mixtures: dict[str, dict[str, Array]] = defaultdict(dict)
    for name, tensor in config.tensors.items():
        match = re.fullmatch(LAYER + _RECURRENCE + r"x_(\w)", name)
        if match is not None:
            mixtures[match[1]][match[2]] = floats(tensor.values())
    joined: dict[str, Array] = {}
    for layer, shares in mixtures.items():
        rows = [shares["x"]] if "x" in shares else [shares[letter] for letter in _MIXTURES if letter in shares]
        joined[f"blk.{layer}.time_mix_lerp_fused.weight"] = np.concatenate(
            [row.reshape(-1, 1, 1, config.hidden_size) for row in rows]
        )
    return joined


@dataclass(frozen=True)
class TimeMixSizes:
    """Sizes of a recurrence: heads of ``head_dim`` values, and the ranks of its pairs of matrices, by letter."""

    head_dim: int
    ranks: Mapping[str, int]

    @classmethod
    def read(cls, m: Header) -> TimeMixSizes:
        dim = m.meta.read("wkv.head_size", int, low=1, high=1 << 12)
        m.meta.check_multiple("embedding_length", m.config.n_embd, "wkv.head_size", dim)
        m.meta.skip("attention.head_count", "token_shift_count")  # 0, and a number that follows from the architecture
        ranks = {
            letter: m.meta.read(f"attention.{name}_lora_rank", int, 0, low=0, high=1 << 16)
            for letter, name in _RANKS.items()
        }
        return cls(dim, ranks)


def shifted(at: Layer, x: Tensor, shares: Weight, row: int, name: str) -> Tensor:
    """Return the mixture of each token's and the previous token's values with the shares in a row."""
    return at.add(CausalConv(x, TokenShift(shares, row), at.graph.state(f"shift_{name}", 1, x.width)))


def low_rank(at: Layer, x: Tensor, letter: str, rank: int, activation: str | None = None) -> Tensor:
    """Return the product with a pair of matrices, with an activation between them, plus an optional bias."""
    w, d = at.weights, at.n_embd
    y = at.linear(x, f"time_mix_{letter}1", rank)
    if activation is not None:
        y = at.add(Activation(y, activation))
    bias = w.find(f"time_mix_{letter}0.weight", d)
    return at.add(Linear(y, Matrix(w.require(f"time_mix_{letter}2.weight", d, rank), bias)))


def time_mix(
    at: Layer, x: Tensor, sizes: TimeMixSizes, first_value: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the residual plus the result of the recurrence, and the values of the first layer.

    ``first_value`` is None in the first layer.
    """
    w, d, ranks = at.weights, at.n_embd, sizes.ranks
    has_gate = "time_mix_g1.weight" in w
    shares = w.require("time_mix_lerp_fused.weight", len(_MIXTURES) if has_gate else len(_MIXTURES) - 1, 1, 1, d)
    mixed = {letter: shifted(at, x, shares, i, letter) for i, letter in enumerate(_MIXTURES[: shares.shape[0]])}
    r, k, v = (at.linear(mixed[letter], f"time_mix_{_PROJECTIONS[letter]}", d) for letter in "rkv")
    decay = low_rank(at, mixed["w"], "w", ranks["w"], "tanh")
    rate = low_rank(at, mixed["a"], "a", ranks["a"])
    if first_value is None:
        first_value = v
        w.skip(*(f"time_mix_v{i}.weight" for i in range(3)))
    else:
        part = low_rank(at, mixed["v"], "v", ranks["v"])
        v = add(at, at.add(Gated(part, add(at, v, first_value, -1.0), "sigmoid")), v)
    state = at.graph.state("S", d // sizes.head_dim, sizes.head_dim, sizes.head_dim)
    key_scale, key_rate, bonus = (w.require(f"time_mix_{name}.weight", d) for name in ("k_k", "k_a", "r_k"))
    y, of_bonus = at.add(WKV(r, k, v, decay, state, rate, key_scale, key_rate, bonus))
    y = add(at, head_norm(at, y, sizes.head_dim), of_bonus)
    if has_gate:
        y = at.add(Gated(low_rank(at, mixed["g"], "g", ranks["g"], "sigmoid"), y, "identity"))
    return at.linear(y, "time_mix_output", d, residual=residual), first_value


def head_norm(at: Layer, x: Tensor, head_dim: int) -> Tensor:
    """Return the LayerNorm of each head; x itself if the file has no such norm."""
    weight = at.weights.find("time_mix_ln.weight", x.width)
    if weight is None:
        return x
    bias = at.weights.require("time_mix_ln.bias", x.width)
    return at.add(LayerNorm(x, weight, bias, HEAD_NORM_EPS, x.width // head_dim))


def record(m: Header) -> Graph:
    sizes, n_ff, is_qwen = TimeMixSizes.read(m), m.mlp_width(), m.meta.architecture == "arwkv7"
    record_norm, eps = (norm, m.norm_eps) if is_qwen else (layer_norm, m.layer_norm_eps)
    first_value: Tensor | None = None

    def layer(at: Layer, x: Tensor) -> Tensor:
        nonlocal first_value
        x, first_value = time_mix(at, record_norm(at, "attn_norm", x), sizes, first_value, x)
        if is_qwen:
            return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)
        y = layer_norm(at, "attn_norm_2", x)
        y = shifted(at, y, at.weights.require("channel_mix_lerp_k.weight", at.n_embd), 0, "mlp")
        y = at.add(Activation(at.linear(y, "channel_mix_key", n_ff), "relu2"))
        return at.linear(y, "channel_mix_value", at.n_embd, residual=x)

    def embedding(at: Layer, x: Tensor) -> Tensor:
        return x if is_qwen else layer_norm(at, "token_embd_norm", x)

    return decoder(m, layer, change_embedding=embedding, output_norm=record_norm, norm_eps=eps)
