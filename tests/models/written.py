"""Tiny random models that transformers lacks, computed in NumPy from the formulas of their own code.

An entry is the configuration, the shapes of the checkpoint's tensors, and the forward pass, in float64. The formulas
are those of the code that comes with the released checkpoints, or of llama.cpp's graphs (``src/models``) where a
comment says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.checkpoints import parsed

Array = NDArray[np.float64]

#: Sizes in the tables of shapes.
SIZES = {"V": 300, "D": 64, "F": 172, "K": 32, "E": 6, "M": 48, "H": 4, "HD": 16}
N_LAYERS, N_HEADS, EPS = 4, 4, 1e-5


# -- Formulas --------------------------------------------------------------------------------------------------------


def rms(x: Array, weight: Array | float = 1.0, eps: float = EPS) -> Array:
    y: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return y


def sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def softmax(x: Array) -> Array:
    y = np.exp(x - x.max(axis=-1, keepdims=True))
    z: Array = y / y.sum(axis=-1, keepdims=True)
    return z


def rotate(x: Array, theta: float = 10_000.0, n_rot: int | None = None, first: int = 0, turn: int = 1) -> Array:
    """Rotate pairs (i, i + n/2) of the values from ``first`` of heads [T, H, dim] by ``turn`` * position."""
    n = x.shape[-1] if n_rot is None else n_rot
    angles = turn * np.arange(len(x))[:, None, None] * theta ** -(np.arange(0, n, 2) / n)
    one, other = x[..., first : first + n // 2], x[..., first + n // 2 : first + n]
    turned = [one * np.cos(angles) - other * np.sin(angles), other * np.cos(angles) + one * np.sin(angles)]
    return np.concatenate([x[..., :first], *turned, x[..., first + n :]], axis=-1)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    bias: Callable[[Array], Array] = lambda scores: scores,
    causal: bool = True,
) -> Array:
    """Return attention [T, H * dim] of heads [T, H, dim]. ``bias`` changes scores [H, T, T]."""
    n, groups = len(q), q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = bias(np.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale))
    distance = np.arange(n)[:, None] - np.arange(n)
    masked = (distance < 0 if causal else np.zeros((n, n), bool)) | (distance >= (window or n))
    return np.einsum("hts,shd->thd", softmax(np.where(masked, -np.inf, scores)), v).reshape(n, -1)


def alibi(n_heads: int, max_bias: float = 8.0) -> Callable[[Array], Array]:
    """Return a function that adds ALiBi's slopes of a power of two of heads."""
    slopes = 2.0 ** (-max_bias * np.arange(1, n_heads + 1) / n_heads)

    def add(scores: Array) -> Array:
        n = scores.shape[-1]
        return scores + slopes[:, None, None] * (np.arange(n) - np.arange(n)[:, None])

    return add


def mixture(x: Array, weights: Array, expert: Callable[[int, Array], Array]) -> Array:
    """Return the sum over experts of weights [T, E] times their outputs."""
    return sum(weights[:, [i]] * expert(i, x) for i in range(weights.shape[1]))


def top(scores: Array, k: int, weights: Array | None = None) -> Array:
    """Return the weights (by default the scores) [T, E] of the k experts with the largest scores; 0 for others."""
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    mask = np.zeros(scores.shape)
    np.put_along_axis(mask, chosen, 1, axis=-1)
    return mask * (scores if weights is None else weights)


def normalized(weights: Array) -> Array:
    y: Array = weights / weights.sum(axis=-1, keepdims=True)
    return y


class Tensors:
    """Tensors of a checkpoint whose names start with ``prefix``."""

    def __init__(self, arrays: Mapping[str, Array], prefix: str = "") -> None:
        self._arrays, self._prefix = arrays, prefix

    def __getitem__(self, name: str) -> Array:
        full = self._prefix + name
        return self._arrays[full if full in self._arrays else f"{full}.weight"]

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._arrays

    def at(self, prefix: str) -> Tensors:
        return Tensors(self._arrays, f"{self._prefix}{prefix}.")

    def layers(self, name: str = "model.layers", n: int = N_LAYERS) -> Iterator[Tensors]:
        return (self.at(f"{name}.{i}") for i in range(n))

    def linear(self, x: Array, name: str) -> Array:
        y: Array = x @ self[name].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y

    def heads(self, x: Array, name: str, dim: int = SIZES["HD"]) -> Array:
        """Return a product as heads [T, H, dim]."""
        return self.linear(x, name).reshape(len(x), -1, dim)

    def rms(self, x: Array, name: str, added: float = 0.0) -> Array:
        return rms(x, self[name] + added)

    def layer_norm(self, x: Array, name: str) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        y: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * self[name] + self[f"{name}.bias"]
        return y

    def gated_mlp(
        self, x: Array, activation: Callable[[Array], Array] = silu, names: str = "gate_proj up_proj down_proj"
    ) -> Array:
        gate, up, down = names.split()
        return self.linear(activation(self.linear(x, gate)) * self.linear(x, up), down)


# -- Models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A model: its config.json, a table of tensors, and its logits [T, n_vocab] for token ids.

    A line of the table has the name of a tensor and its sizes, as numbers or names of `SIZES`. ``*`` in a name is the
    number of each layer, ``{e}`` the number of each expert. Names end with ``.weight`` unless they end with a word
    with a dot before it that is "bias", or with "!".
    """

    settings: Mapping[str, Any]
    shapes: str
    logits: Callable[[Tensors, NDArray[np.int64]], Array]
    is_tied: bool = False
    is_encoder: bool = False  # whether the result is vectors [T, d] instead of logits

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for line in self.shapes.split("\n"):
            name, *sizes = line.split() or [""]
            if name:
                shape = tuple(SIZES[size] if size in SIZES else int(size) for size in sizes)
                full = name.removesuffix("!") if name.endswith(("!", ".bias")) else f"{name}.weight"
                for i in range(N_LAYERS if "*" in full else 1):
                    for e in range(SIZES["E"] if "{e}" in full else 1):
                        yield full.replace("*", str(i)).replace("{e}", str(e)), shape


class WrittenModel:
    """A random model of `Written`, with the interface of transformers' models that the tests use."""

    release = None

    def __init__(self, written: Written, values: Callable[[str, tuple[int, ...]], NDArray[Any]]) -> None:
        import torch

        self._written = written
        self._tensors = {n: torch.from_numpy(values(n, shape)).to(torch.bfloat16) for n, shape in written.names()}
        self._arrays = {name: tensor.double().numpy() for name, tensor in self._tensors.items()}
        self.config = SimpleNamespace(vocab_size=SIZES["V"], tie_word_embeddings=written.is_tied)

    def __call__(self, ids: Any, **_: Any) -> Any:
        import torch
        from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

        rows = self._written.logits(Tensors(self._arrays), ids[0].numpy())
        result = torch.from_numpy(rows.astype(np.float32))[None]
        return (
            BaseModelOutput(last_hidden_state=result) if self._written.is_encoder else CausalLMOutput(logits=result)
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors)

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Any]) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self._written.settings)))
        save_file(dict(state_dict), folder / "model.safetensors")


#: Settings of Llama's kind.
SETTINGS = parsed("""
    hidden_size=64 intermediate_size=172 num_hidden_layers=4 num_attention_heads=4 num_key_value_heads=2 head_dim=16
    vocab_size=300 max_position_embeddings=128 rms_norm_eps=1e-5 tie_word_embeddings=False rope_theta=10_000.0
""")
EMBEDDING = """
    model.embed_tokens V D
    model.norm D
    lm_head V D
"""
ATTENTION = """
    model.layers.*.input_layernorm D
    model.layers.*.self_attn.q_proj D D
    model.layers.*.self_attn.k_proj K D
    model.layers.*.self_attn.v_proj K D
    model.layers.*.self_attn.o_proj D D
    model.layers.*.post_attention_layernorm D
"""
MLP = """
    model.layers.*.mlp.gate_proj F D
    model.layers.*.mlp.up_proj F D
    model.layers.*.mlp.down_proj D F
"""


def settings(model_type: str, kind: str, text: str = "", **changes: Any) -> dict[str, Any]:
    """Return config.json with changes; None removes a setting."""
    values = SETTINGS | {"model_type": model_type, "architectures": [kind]} | parsed(text) | changes
    return {name: value for name, value in values.items() if value is not None}


def self_attention(at: Tensors, x: Array, **options: Any) -> Array:
    """Return Llama's attention."""
    q, k, v = (at.heads(x, f"{name}_proj") for name in "qkv")
    return at.linear(attend(rotate(q), rotate(k), v, **options), "o_proj")


def head(w: Tensors, x: Array) -> Array:
    return w.linear(w.rms(x, "model.norm"), "lm_head")


def arctic(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for at in w.layers():
        y = x + self_attention(at.at("self_attn"), at.rms(x, "input_layernorm"))
        y = y + at.at("residual_mlp").gated_mlp(at.rms(y, "residual_layernorm"), names="w1 w3 w2")
        moe, z = at.at("block_sparse_moe"), at.rms(x, "post_attention_layernorm")
        weights = normalized(top(softmax(moe.linear(z, "gate")), 2))
        x = y + mixture(z, weights, lambda e, z, moe=moe: moe.at(f"experts.{e}").gated_mlp(z, names="w1 w3 w2"))
    return head(w, x)


def maple(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for i, at in enumerate(w.layers()):
        attn, y = at.at("self_attn"), at.rms(x, "input_layernorm")
        q, k = (attn.rms(attn.heads(y, f"{name}_proj"), f"{name}_norm") for name in "qk")
        if i % 4 < 3:
            q, k = rotate(q, n_rot=8), rotate(k, n_rot=8)
        v = attn.heads(y, "v_proj")
        x = x + attn.linear(attend(q, k, v, window=7 if i % 4 < 3 else None), "o_proj")
        mlp, y = at.at("mlp"), at.rms(x, "post_attention_layernorm")

        def expert(e: int, y: Array, mlp: Tensors = mlp) -> Array:
            part = mlp.at(f"experts.{e}")
            gate = silu(np.minimum(part.linear(y, "gate_proj"), 7))
            return part.linear(gate * np.clip(part.linear(y, "up_proj"), -7, 7), "down_proj")

        x = x + mixture(y, normalized(top(softmax(mlp.linear(y, "gate")), 2)), expert)
    return head(w, x)


def spark2_5(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for i, at in enumerate(w.layers()):
        attn, y = at.at("self_attn"), at.rms(x, "input_layernorm")
        q, k, v = np.split(attn.heads(y, "q_k_v_proj"), [4, 6], axis=1)
        theta, n_rot, window = (10_000.0, 16, 7) if i % 4 < 3 else (500_000.0, 4, None)
        z = attend(rotate(q, theta, n_rot), rotate(k, theta, n_rot), v, window=window)
        z = z * np.repeat(sigmoid(attn.linear(y, "g_proj")), 16, axis=1)
        x = x + attn.linear(z, "o_proj")
        x = x + at.at("mlp").gated_mlp(at.rms(x, "post_attention_layernorm"), gelu)
    return head(w, x)


def smallthinker(w: Tensors, ids: NDArray[np.int64], *, has_windows: bool = True) -> Array:
    x = w["model.embed_tokens"][ids]
    for i, at in enumerate(w.layers()):
        moe, attn, y = at.at("block_sparse_moe"), at.at("self_attn"), at.rms(x, "input_layernorm")
        weights = normalized(top(sigmoid(moe.linear(x, "primary_router")), 2))
        q, k, v = (attn.heads(y, f"{name}_proj") for name in "qkv")
        is_full = has_windows and i % 4 == 0
        if not is_full:
            q, k = rotate(q), rotate(k)
        x = x + attn.linear(attend(q, k, v, window=7 if has_windows and not is_full else None), "o_proj")
        y = at.rms(x, "post_attention_layernorm")
        x = x + mixture(y, weights, lambda e, y, moe=moe: moe.at(f"experts.{e}").gated_mlp(y, relu, "gate up down"))
    return head(w, x)


def plamo(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for at in w.layers("model.layers.layers"):
        attn, y = at.at("self_attn"), at.rms(x, "norm")
        q, k, v = (attn.heads(y, f"{name}_proj") for name in "qkv")
        k, v = np.tile(k, (1, 2, 1)), np.tile(v, (1, 2, 1))
        x = x + attn.linear(attend(rotate(q), rotate(k), v), "o_proj") + at.at("mlp").gated_mlp(y)
    return head(w, x)


def jais(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["transformer.wte"][ids] * 3.0
    for at in w.layers("transformer.h"):
        y = at.layer_norm(x, "ln_1")
        q, k, v = np.split(y @ at["attn.c_attn"] + at["attn.c_attn.bias"], 3, axis=1)
        q, k, v = (part.reshape(len(x), 4, 16) for part in (q, k, v))
        x = x + attend(q, k, v, scale=1 / 16, bias=alibi(4)) @ at["attn.c_proj"] + at["attn.c_proj.bias"]
        y = at.layer_norm(x, "ln_2")
        gate, up = (y @ at[f"mlp.{name}"] + at[f"mlp.{name}.bias"] for name in ("c_fc2", "c_fc"))
        x = x + (silu(gate) * up) @ at["mlp.c_proj"] + at["mlp.c_proj.bias"]
    return w.linear(w.layer_norm(x, "transformer.ln_f"), "lm_head") * (2.0 * 0.25)


def refact(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["transformer.wte"][ids]
    for at in w.layers("transformer.h"):
        y = at.rms(x, "ln_1")
        q, (k, v) = at.heads(y, "attn.q"), np.split(at.heads(y, "attn.kv"), 2, axis=1)
        x = x + at.linear(attend(q, k, v, bias=alibi(4)), "attn.c_proj")
        gate, up = np.split(at.linear(at.rms(x, "ln_2"), "mlp.gate_up_proj"), 2, axis=1)
        x = x + at.linear(silu(gate) * up, "mlp.c_proj")
    return w.linear(w.rms(x, "transformer.ln_f"), "lm_head")


def interleaved(x: Array) -> Array:
    """Rotate pairs (2i, 2i + 1) of heads [T, H, dim]; the result has the order of `rotate`."""
    return rotate(np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1))


def plm(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for at in w.layers():
        attn, y = at.at("self_attn"), at.rms(x, "input_layernorm")
        q, (latent, k_rot) = attn.heads(y, "q_proj", 64), np.split(attn.linear(y, "kv_a_proj_with_mqa"), [64], axis=1)
        k, v = np.split(attn.heads(attn.rms(latent, "kv_a_layernorm"), "kv_b_proj", 64), 2, axis=2)
        q = np.concatenate([q[..., :32], interleaved(q[..., 32:])], axis=2)
        k = np.concatenate([k, np.repeat(interleaved(k_rot[:, None]), 4, axis=1)], axis=2)
        x = x + attn.linear(attend(q, k, v), "o_proj")
        mlp = at.at("mlp")
        x = x + mlp.linear(relu(mlp.linear(at.rms(x, "post_attention_layernorm"), "up_proj")) ** 2, "down_proj")
    return w.linear(w.rms(x, "model.norm"), "model.embed_tokens")


def nanbeige(w: Tensors, ids: NDArray[np.int64], *, norms: bool = True) -> Array:
    x = w["model.embed_tokens"][ids]
    for loop in range(2):
        if loop and norms:
            x = w.rms(x, "model.norm")
        for at in w.layers():
            x = x + self_attention(at.at("self_attn"), at.rms(x, "input_layernorm"))
            x = x + at.at("mlp").gated_mlp(at.rms(x, "post_attention_layernorm"))
    return head(w, x)


def talkie(w: Tensors, ids: NDArray[np.int64]) -> Array:
    eps = float(np.finfo(np.float32).eps)
    x = e = rms(w["model.embed"][ids], eps=eps)
    for at in w.layers("model.blocks"):
        attn, y = at.at("attn"), rms(x, eps=eps)
        # a negative angle: the negated sine
        q, k = (rotate(attn.heads(y, f"attn_{name}"), turn=-1) for name in ("query", "key"))
        q, v = rms(q, attn["head_gain.head_g"][:, None], eps), attn.heads(y, "attn_value")
        x = x + at["attn_gain.a_g"] * attn.linear(attend(q, rms(k, eps=eps), v), "attn_resid")
        x = x + at["mlp_gain.a_g"] * at.at("mlp").gated_mlp(rms(x, eps=eps), names="mlp_gate mlp_linear mlp_resid")
        x = x + at["embed_skip.a_g"] * e
    return w["lm_head_gain.w_g"] * (rms(x, eps=eps) @ w["lm_head"].T)


def cogvlm(w: Tensors, ids: NDArray[np.int64], *, n_kv: int = 4, theta: float = 10_000.0) -> Array:
    x = w["model.embed_tokens"][ids]
    for at in w.layers():
        attn, y = at.at("self_attn"), at.rms(x, "input_layernorm")
        q, k, v = np.split(attn.heads(y, "language_expert_query_key_value"), [4, 4 + n_kv], axis=1)
        x = x + attn.linear(attend(rotate(q, theta), rotate(k, theta), v), "language_expert_dense")
        x = x + at.at("mlp.language_mlp").gated_mlp(at.rms(x, "post_attention_layernorm"))
    return head(w, x)


def cogvlm_shapes(n_rows: int) -> str:
    """Return the table of tensors, with ``n_rows`` rows of queries, keys and values."""
    expert = f"""
    model.layers.*.self_attn.KIND_expert_query_key_value {n_rows} D
    model.layers.*.self_attn.KIND_expert_dense D D
    model.layers.*.mlp.KIND_mlp.gate_proj F D
    model.layers.*.mlp.KIND_mlp.up_proj F D
    model.layers.*.mlp.KIND_mlp.down_proj D F
    model.layers.*.input_layernorm D
    model.layers.*.post_attention_layernorm D
    model.vision.linear_proj.linear_proj D D
    """
    return EMBEDDING + expert.replace("KIND", "language") + expert.replace("KIND", "vision")


def grovemoe(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for at in w.layers():
        attn, mlp, y = at.at("self_attn"), at.at("mlp"), at.rms(x, "input_layernorm")
        q, k = (rotate(attn.rms(attn.heads(y, f"{name}_proj"), f"{name}_norm")) for name in "qk")
        x = x + attn.linear(attend(q, k, attn.heads(y, "v_proj")), "o_proj")
        y = at.rms(x, "post_attention_layernorm")
        logits = mlp.linear(y, "gate")
        weights = normalized(top(sigmoid(logits), 2, softmax(logits)))
        x = x + mixture(y, weights, lambda e, y, mlp=mlp: mlp.at(f"experts.{e}").gated_mlp(y))
        of_groups = weights.reshape(len(x), -1, 2).sum(axis=2)
        x = x + 0.05 * mixture(y, of_groups, lambda e, y, mlp=mlp: mlp.at(f"chunk_experts.{e}").gated_mlp(y))
    return head(w, x)


def grok(w: Tensors, ids: NDArray[np.int64], *, has_mlp: bool = True) -> Array:
    x = w["model.embed_tokens"][ids] * 1.7
    factors = np.maximum(np.log(np.maximum(np.arange(len(ids)), 1)) / math.log(16), 1)[None, :, None]
    for at in w.layers():
        attn, moe, y = at.at("self_attn"), at.at("block_sparse_moe"), at.rms(x, "pre_attn_norm")
        q, k, v = (attn.heads(y, f"{name}_proj") for name in "qkv")
        y = attend(rotate(q), rotate(k), v, scale=0.3, bias=lambda scores: 3 * np.tanh(factors * scores / 3))
        x = x + at.rms(attn.linear(y, "o_proj"), "post_attn_norm")
        y = at.rms(x, "pre_moe_norm")
        weights = top(softmax(4 * np.tanh(moe.linear(y, "gate") / 4)), 2)
        z = mixture(y, weights, lambda e, y, moe=moe: moe.at(f"experts.{e}").gated_mlp(y, gelu_tanh, "w1 w3 w2"))
        if has_mlp:
            z = (z + at.at("mlp").gated_mlp(y, gelu_tanh)) / math.sqrt(2)
        x = x + at.rms(z, "post_moe_norm")
    logits = head(w, x) * 0.6
    return 5 * np.tanh(logits / 5)


GROK = """
    model.embed_tokens V D
    model.norm D
    lm_head V D
    model.layers.*.pre_attn_norm D
    model.layers.*.post_attn_norm D
    model.layers.*.pre_moe_norm D
    model.layers.*.post_moe_norm D
    model.layers.*.self_attn.q_proj D D
    model.layers.*.self_attn.k_proj K D
    model.layers.*.self_attn.v_proj K D
    model.layers.*.self_attn.o_proj D D
    model.layers.*.block_sparse_moe.gate E D
    model.layers.*.block_sparse_moe.experts.{e}.w1 M D
    model.layers.*.block_sparse_moe.experts.{e}.w2 D M
    model.layers.*.block_sparse_moe.experts.{e}.w3 M D
"""
GROK_SETTINGS = parsed("""
    num_local_experts=6 num_experts_per_tok=2 moe_intermediate_size=48 attn_logit_softcapping=3.0
    router_logit_softcapping=4.0 final_logit_softcapping=5.0 attn_output_multiplier=0.3 hidden_act=gelu
    embedding_multiplier_scale=1.7 output_multiplier_scale=0.6 attn_temperature_len=16
""")


def nomic_bert_moe(w: Tensors, ids: NDArray[np.int64]) -> Array:
    """Return the vectors [T, d] without the experts' bias, which files lack."""
    x = w["embeddings.word_embeddings"][ids] + w["embeddings.token_type_embeddings"][0]
    x = w.layer_norm(x, "emb_ln")
    for i, at in enumerate(w.layers("encoder.layers")):
        q, k, v = np.split(at.heads(x, "attn.Wqkv"), 3, axis=1)
        y = at.linear(attend(rotate(q), rotate(k), v, causal=False), "attn.out_proj")
        x, mlp = at.layer_norm(x + y, "norm1"), at.at("mlp")
        if i % 2:
            ups, downs = (mlp[f"experts.mlp.{name}"].reshape(6, 48, 64) for name in ("w1", "w2"))
            weights = top(softmax(mlp.linear(x, "router.layer")), 2)
            y = mixture(x, weights, lambda e, x, ups=ups, downs=downs: gelu(x @ ups[e].T) @ downs[e])
        else:
            y = mlp.linear(gelu(mlp.linear(x, "fc1")), "fc2")
        x = at.layer_norm(x + y, "norm2")
    return x


def plamo_norm(x: Array, at: Tensors, name: str, offset: float = 1.0) -> Array:
    return rms(x, at[name] + offset)


def plamo_mlp(at: Tensors, x: Array) -> Array:
    gate, up = np.split(at.linear(plamo_norm(x, at, "pre_mlp_norm"), "mlp.gate_up_proj"), 2, axis=1)
    return x + plamo_norm(at.linear(silu(gate) * up, "mlp.down_proj"), at, "post_mlp_norm", 5**-1.5)


def plamo_head(w: Tensors, x: Array) -> Array:
    return plamo_norm(x, w, "model.norm") @ w["model.embed_tokens"].T


def plamo3(w: Tensors, ids: NDArray[np.int64]) -> Array:
    x = w["model.embed_tokens"][ids]
    for i, at in enumerate(w.layers("model.layers.layers")):
        mixer, is_full = at.at("mixer"), i % 3 == 2
        q, k, v = np.split(mixer.heads(plamo_norm(x, at, "pre_mixer_norm"), "qkv_proj"), [4, 6], axis=1)
        theta = 1e6 if is_full else 10_000.0
        q, k = (rotate(plamo_norm(part, mixer, f"{name}_norm"), theta) for name, part in (("q", q), ("k", k)))
        y = mixer.linear(attend(q, k, v, window=None if is_full else 7), "o_proj")
        x = plamo_mlp(at, x + plamo_norm(y, at, "post_mixer_norm", 1 / 5))
    return plamo_head(w, x)


def plamo2_scan(at: Tensors, x: Array) -> Array:
    """Return the result of PLaMo 2's recurrent block, for 8 heads of 16 values with 16 rows of state."""
    n, inner = len(x), 128
    z, x = np.moveaxis(at.linear(x, "in_proj").reshape(n, 8, 2, 16), 2, 0).reshape(2, n, inner)
    padded = np.concatenate([np.zeros((3, inner)), x])
    x = silu(sum(padded[i : i + n] * at["conv1d"][:, 0, i] for i in range(4)))
    b, c, dt = np.split(at.linear(x, "bcdt_proj"), [16, 32], axis=1)
    b, c, dt = (rms(part, at[f"{name}_norm_weight"]) for name, part in (("B", b), ("C", c), ("dt", dt)))
    dt = np.logaddexp(0, at.linear(dt, "dt_proj") + at["dt_bias"])
    state, ys = np.zeros((8, 16, 16)), []
    for t in range(n):
        heads = x[t].reshape(8, 16)
        state = np.exp(-np.exp(at["A_log"]) * dt[t])[:, None, None] * state
        state = state + b[t][None, :, None] * (dt[t][:, None] * heads)[:, None, :]
        ys.append(np.einsum("hnp,n->hp", state, c[t]) + at["D"][:, None] * heads)
    return at.linear(silu(z) * np.reshape(ys, (n, inner)), "out_proj")


def plamo2(w: Tensors, ids: NDArray[np.int64], *, window: int | None = 7) -> Array:
    x = w["model.embed_tokens"][ids]
    for i, at in enumerate(w.layers("model.layers.layers")):
        mixer, y = at.at("mixer"), plamo_norm(x, at, "pre_mixer_norm")
        if i % 2:
            q, k, v = np.split(mixer.heads(y, "qkv_proj"), [4, 6], axis=1)
            q, k = rotate(rms(q, mixer["q_weight"])), rotate(rms(k, mixer["k_weight"]))
            y = mixer.linear(attend(q, k, v, window=window if i == 1 else None), "o_proj")
        else:
            y = plamo2_scan(mixer, y)
        x = plamo_mlp(at, x + plamo_norm(y, at, "post_mixer_norm", 1 / 5))
    return plamo_head(w, x)


PLAMO_SHAPES = """
    model.embed_tokens V D
    model.norm D
    model.layers.layers.*.pre_mixer_norm D
    model.layers.layers.*.post_mixer_norm D
    model.layers.layers.*.pre_mlp_norm D
    model.layers.layers.*.post_mlp_norm D
    model.layers.layers.*.mlp.gate_up_proj 344 D
    model.layers.layers.*.mlp.down_proj D F
"""
PLAMO2 = settings(
    "plamo2",
    "Plamo2ForCausalLM",
    """
    mamba_step=2 mamba_d_conv=4 mamba_d_state=16 mamba_num_heads=8 hidden_size_per_head=16 mamba_enabled=True
    tie_word_embeddings=True head_dim=None
    """,
)
PLAMO2_SHAPES = PLAMO_SHAPES + "".join(
    f"""
            model.layers.layers.{i}.mixer.in_proj 256 D
            model.layers.layers.{i}.mixer.conv1d 128 1 4
            model.layers.layers.{i}.mixer.bcdt_proj 96 128
            model.layers.layers.{i}.mixer.dt_proj 8 64
            model.layers.layers.{i}.mixer.dt_bias! 8
            model.layers.layers.{i}.mixer.A_log! 8
            model.layers.layers.{i}.mixer.D! 8
            model.layers.layers.{i}.mixer.dt_norm_weight! 64
            model.layers.layers.{i}.mixer.B_norm_weight! 16
            model.layers.layers.{i}.mixer.C_norm_weight! 16
            model.layers.layers.{i}.mixer.out_proj D 128
            model.layers.layers.{i + 1}.mixer.qkv_proj 128 D
            model.layers.layers.{i + 1}.mixer.q_weight! 4 16
            model.layers.layers.{i + 1}.mixer.k_weight! 2 16
            model.layers.layers.{i + 1}.mixer.o_proj D D
            """
    for i in (0, 2)
)
NO_HEADS = {"head_dim": None, "num_key_value_heads": None}
SMALLTHINKER = parsed("""
    moe_num_primary_experts=6 moe_num_active_primary_experts=2 moe_ffn_hidden_size=48 intermediate_size=None
    sliding_window_size=7 moe_primary_router_apply_softmax=False
""")
SMALLTHINKER_SHAPES = (
    EMBEDDING
    + ATTENTION
    + """
    model.layers.*.block_sparse_moe.primary_router E D
    model.layers.*.block_sparse_moe.experts.{e}.gate M D
    model.layers.*.block_sparse_moe.experts.{e}.up M D
    model.layers.*.block_sparse_moe.experts.{e}.down D M
"""
)
GPT2 = parsed("""
    n_embd=64 n_head=4 n_layer=4 n_positions=128 layer_norm_epsilon=1e-5 vocab_size=300 tie_word_embeddings=False
""")

WRITTEN = {
    "grok": Written(settings("git", "Grok1ForCausalLM", **GROK_SETTINGS), GROK, partial(grok, has_mlp=False)),
    "grok-2": Written(settings("git", "Grok1ForCausalLM", **GROK_SETTINGS), GROK + MLP, grok),
    "nomic-bert-moe": Written(
        parsed("""
            model_type=nomic_bert n_embd=64 n_inner=48 n_layer=4 n_head=4 n_positions=2048 max_trained_positions=2048
            layer_norm_epsilon=1e-5 vocab_size=300 activation_function=gelu causal=False prenorm=False num_experts=6
            moe_every_n_layers=2 moe_top_k=2 qkv_proj_bias=True mlp_fc1_bias=True mlp_fc2_bias=True type_vocab_size=1
            rotary_emb_base=10_000.0 rotary_emb_fraction=1.0 rotary_emb_interleaved=False
        """)
        | {"architectures": ["NomicBertModel"]},
        """
        embeddings.word_embeddings V D
        embeddings.token_type_embeddings 1 D
        emb_ln D
        emb_ln.bias D
        """
        + "".join(
            f"""
            encoder.layers.{i}.attn.Wqkv 192 D
            encoder.layers.{i}.attn.Wqkv.bias 192
            encoder.layers.{i}.attn.out_proj D D
            encoder.layers.{i}.attn.out_proj.bias D
            encoder.layers.{i}.norm1 D
            encoder.layers.{i}.norm1.bias D
            encoder.layers.{i}.norm2 D
            encoder.layers.{i}.norm2.bias D
            """
            + (
                f"""
                encoder.layers.{i}.mlp.router.layer E D
                encoder.layers.{i}.mlp.experts.mlp.w1! 288 D
                encoder.layers.{i}.mlp.experts.mlp.w2! 288 D
                encoder.layers.{i}.mlp.experts.bias D
                """
                if i % 2
                else f"""
                encoder.layers.{i}.mlp.fc1 M D
                encoder.layers.{i}.mlp.fc1.bias M
                encoder.layers.{i}.mlp.fc2 D M
                encoder.layers.{i}.mlp.fc2.bias D
                """
            )
            for i in range(4)
        ),
        nomic_bert_moe,
        is_encoder=True,
    ),
    "plamo2": Written(PLAMO2, PLAMO2_SHAPES, partial(plamo2, window=None), is_tied=True),
    "plamo2-window": Written(
        PLAMO2 | {"attention_window_size": 7, "full_attention_idx": [3]}, PLAMO2_SHAPES, plamo2, is_tied=True
    ),
    "plamo3": Written(
        settings(
            "plamo3",
            "Plamo3ForCausalLM",
            """
            window_size=7 sliding_window_pattern=3 rope_theta=1e6 rope_local_theta=10_000.0 rope_scaling_factor=1
            tie_word_embeddings=True
            """,
        ),
        PLAMO_SHAPES
        + """
        model.layers.layers.*.mixer.qkv_proj 128 D
        model.layers.layers.*.mixer.q_norm HD
        model.layers.layers.*.mixer.k_norm HD
        model.layers.layers.*.mixer.o_proj D D
        """,
        plamo3,
        is_tied=True,
    ),
    "grovemoe": Written(
        settings(
            "grove_moe",
            "GroveMoeForCausalLM",
            "num_experts=6 num_experts_per_tok=2 moe_intermediate_size=48 norm_topk_prob=True decoder_sparse_step=1",
        ),
        EMBEDDING
        + ATTENTION
        + """
        model.layers.*.self_attn.q_norm HD
        model.layers.*.self_attn.k_norm HD
        model.layers.*.mlp.gate E D
        model.layers.*.mlp.expert_bias! E
        model.layers.*.mlp.experts.{e}.gate_proj M D
        model.layers.*.mlp.experts.{e}.up_proj M D
        model.layers.*.mlp.experts.{e}.down_proj D M
        """
        + "".join(
            f"""
            model.layers.*.mlp.chunk_experts.{group}.gate_proj HD D
            model.layers.*.mlp.chunk_experts.{group}.up_proj HD D
            model.layers.*.mlp.chunk_experts.{group}.down_proj D HD
            """
            for group in range(3)
        ),
        grovemoe,
    ),
    "talkie": Written(
        settings(
            "talkie", "TalkieForCausalLM", "n_layer=4 n_head=4 n_embd=64", num_key_value_heads=None, rms_norm_eps=None
        ),
        """
        model.embed V D
        lm_head! V D
        lm_head_gain.w_g! 1
        model.blocks.*.attn.attn_query D D
        model.blocks.*.attn.attn_key D D
        model.blocks.*.attn.attn_value D D
        model.blocks.*.attn.attn_resid D D
        model.blocks.*.attn.head_gain.head_g! H
        model.blocks.*.mlp.mlp_gate F D
        model.blocks.*.mlp.mlp_linear F D
        model.blocks.*.mlp.mlp_resid D F
        model.blocks.*.attn_gain.a_g! 1
        model.blocks.*.mlp_gain.a_g! 1
        model.blocks.*.embed_skip.a_g! 1
        """,
        talkie,
    ),
    "cogvlm": Written(
        settings("cogvlm", "CogVLMForCausalLM", rope_theta=None, **NO_HEADS), cogvlm_shapes(192), cogvlm
    ),
    "cogvlm-2": Written(
        settings("cogvlm", "CogVLMForCausalLM", "num_multi_query_heads=2", rope_theta=None, **NO_HEADS),
        cogvlm_shapes(128),
        partial(cogvlm, n_kv=2, theta=500_000.0),
    ),
    "arctic": Written(
        settings(
            "arctic",
            "ArcticForCausalLM",
            "num_local_experts=6 num_experts_per_tok=2 intermediate_size=48 moe_layer_frequency=1 use_residual=True",
            head_dim=None,
        ),
        EMBEDDING
        + ATTENTION
        + """
        model.layers.*.residual_layernorm D
        model.layers.*.residual_mlp.w1 D D
        model.layers.*.residual_mlp.w2 D D
        model.layers.*.residual_mlp.w3 D D
        model.layers.*.block_sparse_moe.gate E D
        model.layers.*.block_sparse_moe.experts.{e}.w1 M D
        model.layers.*.block_sparse_moe.experts.{e}.w2 D M
        model.layers.*.block_sparse_moe.experts.{e}.w3 M D
        """,
        arctic,
    ),
    "maple": Written(
        settings(
            "maple",
            "MapleForCausalLM",
            """
            num_experts=6 num_experts_per_tok=2 moe_intermediate_size=48 intermediate_size=None sliding_window=7
            norm_topk_prob=True nope_on_global_attention=True hidden_act=silu partial_rotary_factor=0.5
            """,
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
        ),
        EMBEDDING
        + ATTENTION
        + """
        model.layers.*.self_attn.q_norm HD
        model.layers.*.self_attn.k_norm HD
        model.layers.*.mlp.gate E D
        model.layers.*.mlp.experts.{e}.gate_proj M D
        model.layers.*.mlp.experts.{e}.up_proj M D
        model.layers.*.mlp.experts.{e}.down_proj D M
        """,
        maple,
    ),
    "spark2_5": Written(
        settings(
            "spark2_5",
            "Spark2_5ForCausalLM",
            "hidden_act=gelu gate_attn_act_mode=sigmoid headwise_attn_output_gate=True sliding_window=7",
            rope_theta=None,
            rope_parameters={
                "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
            },
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
        ),
        EMBEDDING
        + MLP
        + """
        model.layers.*.input_layernorm D
        model.layers.*.self_attn.q_k_v_proj 128 D
        model.layers.*.self_attn.g_proj H D
        model.layers.*.self_attn.o_proj D D
        model.layers.*.post_attention_layernorm D
        """,
        spark2_5,
    ),
    "smallthinker": Written(
        settings("smallthinker", "SmallThinkerForCausalLM", **SMALLTHINKER)
        | {"rope_layout": [0, 1, 1, 1], "sliding_window_layout": [0, 1, 1, 1]},
        SMALLTHINKER_SHAPES,
        smallthinker,
    ),
    "smallthinker-full": Written(
        settings("smallthinker", "SmallThinkerForCausalLM", **SMALLTHINKER)
        | {"rope_layout": [1] * 4, "sliding_window_layout": [0] * 4},
        SMALLTHINKER_SHAPES,
        partial(smallthinker, has_windows=False),
    ),
    "plamo": Written(
        settings(
            "plamo", "PlamoForCausalLM", "n_shared_head=2", max_position_embeddings=None, rope_theta=None, **NO_HEADS
        ),
        EMBEDDING
        + """
        model.layers.layers.*.norm D
        model.layers.layers.*.self_attn.q_proj D D
        model.layers.layers.*.self_attn.k_proj K D
        model.layers.layers.*.self_attn.v_proj K D
        model.layers.layers.*.self_attn.o_proj D D
        model.layers.layers.*.mlp.gate_proj F D
        model.layers.layers.*.mlp.up_proj F D
        model.layers.layers.*.mlp.down_proj D F
        """,
        plamo,
    ),
    "jais": Written(
        GPT2
        | parsed("""
            model_type=jais n_inner=172 activation_function=swiglu position_embedding_type=alibi
            mup_embeddings_scale=3.0 mup_output_alpha=2.0 mup_width_scale=0.25 mup_scale_qk_dot_by_d=True
        """)
        | {"architectures": ["JAISLMHeadModel"]},
        """
        transformer.wte V D
        transformer.ln_f D
        transformer.ln_f.bias D
        lm_head V D
        transformer.h.*.ln_1 D
        transformer.h.*.ln_1.bias D
        transformer.h.*.ln_2 D
        transformer.h.*.ln_2.bias D
        transformer.h.*.attn.c_attn D 192
        transformer.h.*.attn.c_attn.bias 192
        transformer.h.*.attn.c_proj D D
        transformer.h.*.attn.c_proj.bias D
        transformer.h.*.mlp.c_fc D F
        transformer.h.*.mlp.c_fc.bias F
        transformer.h.*.mlp.c_fc2 D F
        transformer.h.*.mlp.c_fc2.bias F
        transformer.h.*.mlp.c_proj F D
        transformer.h.*.mlp.c_proj.bias D
        """,
        jais,
    ),
    "refact": Written(
        GPT2 | {"model_type": "gpt_refact", "architectures": ["GPTRefactForCausalLM"], "multi_query": True},
        """
        transformer.wte V D
        transformer.ln_f D
        lm_head V D
        transformer.h.*.ln_1 D
        transformer.h.*.ln_2 D
        transformer.h.*.attn.q D D
        transformer.h.*.attn.kv 32 D
        transformer.h.*.attn.c_proj D D
        transformer.h.*.mlp.gate_up_proj 512 D
        transformer.h.*.mlp.c_proj D 256
        """,
        refact,
    ),
    "plm": Written(
        settings(
            "plm",
            "PLMForCausalLM",
            """
            kv_lora_rank=64 qk_nope_head_dim=32 qk_rope_head_dim=32 v_head_dim=32 hidden_act=relu2
            num_key_value_heads=4 tie_word_embeddings=True
            """,
            head_dim=None,
        ),
        """
        model.embed_tokens V D
        model.norm D
        model.layers.*.input_layernorm D
        model.layers.*.self_attn.q_proj 256 D
        model.layers.*.self_attn.kv_a_proj_with_mqa 96 D
        model.layers.*.self_attn.kv_a_layernorm 64
        model.layers.*.self_attn.kv_b_proj 256 64
        model.layers.*.self_attn.o_proj D 128
        model.layers.*.post_attention_layernorm D
        model.layers.*.mlp.up_proj F D
        model.layers.*.mlp.down_proj D F
        """,
        plm,
        is_tied=True,
    ),
    "nanbeige": Written(
        settings("nanbeige", "NanbeigeForCausalLM", "num_loops=2"), EMBEDDING + ATTENTION + MLP, nanbeige
    ),
    "nanbeige-no-norm": Written(
        settings("nanbeige", "NanbeigeForCausalLM", "num_loops=2 skip_loop_final_norm=True"),
        EMBEDDING + ATTENTION + MLP,
        partial(nanbeige, norms=False),
    ),
}
