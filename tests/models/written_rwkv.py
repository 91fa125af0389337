"""Tiny random models of RWKV, computed in NumPy: see `tests.models.written`.

The formulas are those of the papers, and of llama.cpp's graphs where a comment says so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.checkpoints import parsed
from tests.models.written import EMBEDDING, MLP, Array, Tensors, Written, head, relu, sigmoid, silu


def before(x: Array) -> Array:
    """Return the row of each token's previous token; zeros for the first token."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    x = x - x.mean(axis=-1, keepdims=True)
    y: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight + bias
    return y


def head_norm(y: Array, weight: Array, bias: Array) -> Array:
    """Return the norm of heads [T, H, dim], as rows [T, H * dim]."""
    shape = y.shape[1:]
    return layer_norm(y, weight.reshape(shape), bias.reshape(shape), 64e-5).reshape(len(y), -1)


def states_7(r: Array, w: Array, k: Array, v: Array, kappa: Array, a: Array) -> Array:
    """Return the results [T, H, dim] of the states [values, keys] of RWKV 7, equation 16 of the paper."""
    out = np.empty_like(r)
    for h in range(r.shape[1]):
        state = np.zeros((r.shape[2], r.shape[2]))
        for t in range(len(r)):
            removed = np.outer(state @ kappa[t, h], kappa[t, h] * a[t, h])
            state = state * w[t, h] - removed + np.outer(v[t, h], k[t, h])
            out[t, h] = state @ r[t, h]
    return out


def time_mix_7(at: Tensors, x: Array, first: Array | None, *, is_qwen: bool, has_gate: bool) -> tuple[Array, Array]:
    d, n_heads = x.shape[-1], len(at["r_k"])

    def by_head(y: Array) -> Array:
        return y.reshape(len(y), n_heads, -1)

    def mixed(letter: str) -> Array:
        return x + (before(x) - x) * at[f"x_{letter}"].reshape(d)

    def pair(letter: str, function: Any = lambda y: y) -> Array:
        y = mixed(letter)
        if is_qwen:  # the names and the order of ARWKV's code
            bias = 0 if letter == "g" else at[f"{letter}0"].reshape(d)
            return function(y @ at[f"{letter}1"]) @ at[f"{letter}2"] + bias
        return at.linear(function(at.linear(y, f"{letter}_lora.lora.0")), f"{letter}_lora.lora.2")

    names = ("receptance", "key", "value", "output") if is_qwen else ("r_proj", "k_proj", "v_proj", "o_proj")
    r, k, v = (at.linear(mixed(letter), name) for letter, name in zip("rkv", names, strict=False))
    first = v if first is None else first
    if first is not v:
        v = v + (first - v) * sigmoid(pair("v"))
    w, a = np.exp(-np.exp(-0.5) * sigmoid(pair("w", np.tanh))), sigmoid(pair("a"))
    kappa = by_head(k * at["k_k"].reshape(d))
    kappa = kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
    k = k * (1 + (a - 1) * at["k_a"].reshape(d))
    r, w, k, value, a = map(by_head, (r, w, k, v, a))
    y = states_7(r, w, k, value, kappa, a)
    norm = "ln_x" if is_qwen else "g_norm"
    y = head_norm(y, at[norm], at[f"{norm}.bias"]) if f"{norm}.bias" in at else y.reshape(len(y), d)
    y = y + (value * (r * k * at["r_k"]).sum(axis=-1, keepdims=True)).reshape(y.shape)
    y = y * pair("g", sigmoid) if has_gate else y
    return at.linear(y, names[3]), first


def rwkv7(w: Tensors, ids: NDArray[np.int64]) -> Array:
    def norm(at: Tensors, x: Array, name: str) -> Array:
        return layer_norm(x, at[name], at[f"{name}.bias"], 1e-5)

    x, first = norm(w, w["model.embeddings"][ids], "model.layers.0.pre_norm"), None
    for at in w.layers():
        y, first = time_mix_7(at.at("attn"), norm(at, x, "attn_norm"), first, is_qwen=False, has_gate=True)
        x = x + y
        y = norm(at, x, "ffn_norm")
        y = y + (before(y) - y) * at["ffn.x_k"]
        x = x + at.linear(relu(at.linear(y, "ffn.key")) ** 2, "ffn.value")
    return w.linear(norm(w, x, "model.norm"), "lm_head")


def arwkv7(w: Tensors, ids: NDArray[np.int64], *, has_gate: bool) -> Array:
    x, first = w["model.embed_tokens"][ids], None
    for at in w.layers():
        mixer, y = at.at("self_attn.time_mixer"), at.rms(x, "input_layernorm")
        y, first = time_mix_7(mixer, y, first, is_qwen=True, has_gate=has_gate)
        x = x + y
        x = x + at.at("mlp").gated_mlp(at.rms(x, "post_attention_layernorm"))
    return head(w, x)


def states_6(r: Array, w: Array, k: Array, v: Array, bonus: Array | None) -> Array:
    """Return the results [T, H, dim] of the states [keys, values] of RWKV 6, equation 19 of the paper.

    Without ``bonus``, of gated linear attention, scaled.
    """
    out = np.empty_like(r)
    for h in range(r.shape[1]):
        state = np.zeros((r.shape[2], r.shape[2]))
        for t in range(len(r)):
            added = np.outer(k[t, h], v[t, h])
            before_token, state = state, np.diag(w[t, h]) @ state + added
            result = state * r.shape[2] ** -0.5 if bonus is None else before_token + bonus[h][:, None] * added
            out[t, h] = r[t, h] @ result
    return out


def time_mix_6(at: Tensors, x: Array, n_heads: int, *, is_qwen: bool) -> Array:
    d, difference = x.shape[-1], before(x) - x
    names = "q_proj k_proj v_proj gate o_proj" if is_qwen else "receptance key value gate output"
    low = np.tanh((x + difference * at["time_maa_x"].reshape(d)) @ at["time_maa_w1"]).reshape(len(x), 5, -1)
    shares = np.einsum("tmr,mrd->mtd", low, at["time_maa_w2"])
    mixed = {
        letter: x + difference * (at[f"time_maa_{letter}"].reshape(d) + share)
        for letter, share in zip("rkvwg" if is_qwen else "wkvrg", shares, strict=True)
    }
    r, k, v, g = (at.linear(mixed[letter], name) for letter, name in zip("rkvg", names.split(), strict=False))
    low = np.tanh(mixed["w"] @ at["time_decay_w1"]) @ at["time_decay_w2"]
    w = np.exp(-np.exp(at["time_decay"].reshape(d) + low)).reshape(len(x), n_heads, -1)
    r, k, v = (y.reshape(len(x), -1, d // n_heads) for y in (r, k, v))
    k, v = (np.repeat(y, n_heads // y.shape[1], axis=1) for y in (k, v))
    if is_qwen:
        y = states_6(r, w, k * (1 - w), v, None).reshape(len(x), d) * sigmoid(g)
    else:
        y = head_norm(states_6(r, w, k, v, at["time_faaaa"]), at["ln_x"], at["ln_x.bias"]) * silu(g)
    return at.linear(y, names.split()[-1])


def rwkv6(w: Tensors, ids: NDArray[np.int64]) -> Array:
    def norm(at: Tensors, x: Array, name: str) -> Array:
        return layer_norm(x, at[name], at[f"{name}.bias"], 1e-5)

    x = norm(w, w["rwkv.embeddings"][ids], "rwkv.blocks.0.pre_ln")
    for i, at in enumerate(w.layers("rwkv.blocks")):
        scale = 0.5 ** (i // 2)  # with rescale_every = 2, which changes the effect of epsilons only
        x = x + scale * time_mix_6(at.at("attention"), norm(at, x, "ln1"), 2, is_qwen=False)
        y, mlp = norm(at, x, "ln2"), at.at("feed_forward")
        k, r = (y + (before(y) - y) * mlp[f"time_maa_{letter}"].reshape(-1) for letter in "kr")
        y = sigmoid(mlp.linear(r, "receptance")) * mlp.linear(relu(mlp.linear(k, "key")) ** 2, "value")
        x = (x + scale * y) * (0.5 if i % 2 else 1)
    return w.linear(norm(w, x, "rwkv.ln_out"), "head")


def rwkv6qwen2(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for at in w.layers():
        x = x + time_mix_6(at.at("self_attn"), at.rms(x, "input_layernorm"), 4, is_qwen=True)
        x = x + at.at("mlp").gated_mlp(at.rms(x, "post_attention_layernorm"))
    return head(w, x)


COMMON = parsed("hidden_size=64 intermediate_size=172 num_hidden_layers=4 vocab_size=300 tie_word_embeddings=False")
LOW_RANK = "".join(
    f"""
    model.layers.*.attn.{letter}_lora.lora.0 {rank} D
    model.layers.*.attn.{letter}_lora.lora.2 D {rank}
    """
    + ("" if letter == "g" else f"model.layers.*.attn.{letter}_lora.lora.2.bias D\n")
    for letter, rank in {"w": 32, "a": 32, "v": 16, "g": 64}.items()
)
LOW_RANK_OF_QWEN = {
    letter: f"""
    model.layers.*.self_attn.time_mixer.{letter}1! D {rank}
    model.layers.*.self_attn.time_mixer.{letter}2! {rank} D
    """
    + ("" if letter == "g" else f"model.layers.*.self_attn.time_mixer.{letter}0! 1 1 D\n")
    for letter, rank in {"w": 64, "a": 64, "v": 32, "g": 128}.items()
}


def rows(prefix: str, names: str, sizes: str) -> str:
    """Return lines of a table of tensors in every layer."""
    return "".join(f"model.layers.*.{prefix}{name} {sizes}\n" for name in names.split())


def with_bias(names: str) -> str:
    return "".join(f"{name} D\n{name}.bias D\n" for name in names.split())


#: llama.cpp computes heads of 64 values only.
RWKV7 = (
    (
        with_bias("model.layers.0.pre_norm model.norm model.layers.*.attn_norm model.layers.*.ffn_norm")
        + with_bias("model.layers.*.attn.g_norm")
        + "model.embeddings V D\nlm_head V D\n"
        + rows("attn.", "x_r! x_w! x_k! x_v! x_a! x_g!", "1 1 D")
        + rows("attn.", "k_k! k_a!", "D")
        + rows("attn.", "r_k!", "H HD")
        + rows("attn.", "r_proj k_proj v_proj o_proj", "D D")
        + LOW_RANK
        + rows("ffn.", "x_k!", "D")
        + rows("ffn.", "key", "F D")
        + rows("ffn.", "value", "D F")
    )
    .replace(" HD", " 64")
    .replace(" H ", " 2 ")
    .replace(" D", " 128")
)


def arwkv7_shapes(has_gate: bool) -> str:
    pairs = "".join(LOW_RANK_OF_QWEN[letter] for letter in ("wavg" if has_gate else "wav"))
    norm = with_bias("model.layers.*.self_attn.time_mixer.ln_x") if has_gate else ""
    return (
        EMBEDDING
        + MLP
        + pairs
        + norm
        + rows("", "input_layernorm post_attention_layernorm", "D")
        + rows("self_attn.time_mixer.", "x_r! x_w! x_k! x_v! x_a!" + " x_g!" * has_gate, "1 1 D")
        + rows("self_attn.time_mixer.", "k_k! k_a!", "1 1 D")
        + rows("self_attn.time_mixer.", "r_k!", "1 64" if has_gate else "H HD")
        + rows("self_attn.time_mixer.", "receptance key value output", "D D")
    )


RWKV6 = (
    with_bias(
        "rwkv.blocks.0.pre_ln rwkv.ln_out rwkv.blocks.*.ln1 rwkv.blocks.*.ln2 rwkv.blocks.*.attention.ln_x"
    ).replace(" D", " 128")
    + "rwkv.embeddings V 128\nhead V 128\n"
    + rows("", "time_maa_x! time_maa_w! time_maa_k! time_maa_v! time_maa_r! time_maa_g! time_decay!", "1 1 128")
    + rows("", "time_maa_w1!", "128 160")
    + rows("", "time_maa_w2!", "5 32 128")
    + rows("", "time_decay_w1!", "128 64")
    + rows("", "time_decay_w2!", "64 128")
    + rows("", "time_faaaa!", "2 64")
    + rows("", "receptance key value gate output", "128 128")
).replace("model.layers.*.", "rwkv.blocks.*.attention.") + (
    rows("", "time_maa_k! time_maa_r!", "1 1 128")
    + rows("", "key", "F 128")
    + rows("", "value", "128 F")
    + rows("", "receptance", "128 128")
).replace("model.layers.*.", "rwkv.blocks.*.feed_forward.")
RWKV6_OF_QWEN = (
    EMBEDDING
    + MLP
    + rows("", "input_layernorm post_attention_layernorm", "D")
    + rows(
        "self_attn.", "time_maa_x! time_maa_w! time_maa_k! time_maa_v! time_maa_r! time_maa_g! time_decay!", "1 1 D"
    )
    + rows("self_attn.", "time_maa_w1!", "D 160")
    + rows("self_attn.", "time_maa_w2!", "5 32 D")
    + rows("self_attn.", "time_decay_w1!", "D 64")
    + rows("self_attn.", "time_decay_w2!", "64 D")
    + rows("self_attn.", "q_proj gate o_proj", "D D")
    + rows("self_attn.", "k_proj v_proj", "K D")
    + rows("self_attn.", "q_proj.bias", "D")
    + rows("self_attn.", "k_proj.bias v_proj.bias", "K")
)

ARWKV = COMMON | parsed("""
    model_type=rwkv_hybrid architectures=['RwkvHybridForCausalLM'] head_size=16 rms_norm_eps=1e-5 wkv_version=7
    wkv_layers=full num_attention_heads=4 num_key_value_heads=2 hidden_act=silu head_size_divisor=8 num_wkv_heads=4
    max_position_embeddings=128 use_sliding_window=False
""")
WRITTEN_RWKV = {
    "rwkv6": Written(
        COMMON
        | parsed("""
            model_type=rwkv6 architectures=['Rwkv6ForCausalLM'] hidden_size=128 attention_hidden_size=128 head_size=64
            head_size_divisor=8 layer_norm_epsilon=1e-5 rescale_every=2 model_version=6_0
        """),
        RWKV6,
        rwkv6,
    ),
    "rwkv6qwen2": Written(
        COMMON
        | parsed("""
            model_type=rwkv6qwen2 architectures=['RWKV6Qwen2ForCausalLM'] rms_norm_eps=1e-5 num_attention_heads=4
            num_key_value_heads=2 hidden_act=silu max_position_embeddings=128 lora_rank_tokenshift=32
            lora_rank_decay=64
        """),
        RWKV6_OF_QWEN,
        rwkv6qwen2,
    ),
    "rwkv7": Written(
        COMMON
        | parsed("""
            model_type=rwkv7 architectures=['RWKV7ForCausalLM'] head_dim=64 norm_eps=1e-5 hidden_size=128
            decay_low_rank_dim=32 a_low_rank_dim=32 v_low_rank_dim=16 gate_low_rank_dim=64 hidden_act=sqrelu
            hidden_ratio=4.0 norm_bias=True norm_first=True attn_mode=chunk max_position_embeddings=2048
        """),
        RWKV7,
        rwkv7,
    ),
    "arwkv7": Written(
        ARWKV | {"head_size": 64, "wkv_has_gate": True, "wkv_has_group_norm": True},
        arwkv7_shapes(True),
        partial(arwkv7, has_gate=True),
    ),
    "arwkv7-plain": Written(
        ARWKV | {"wkv_has_gate": False, "wkv_has_group_norm": False},
        arwkv7_shapes(False),
        partial(arwkv7, has_gate=False),
    ),
}
