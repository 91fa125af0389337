"""Gemma 3n: Gemma 4's E2B with four residual streams instead of one. A layer computes one stream, and learnt weights
update the other streams (AltUp, arXiv:2301.13310). A low-rank path runs in parallel to attention (LAuReL,
arXiv:2411.07501). The first layers only use the largest activations of the MLP."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Tensor
from localllm.models import gemma4
from localllm.models.blocks import Layer, add, decoder, norm, read_softcap
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, Array, window_keys
from localllm.models.rope import make_local_rope, make_rope
from localllm.models.weights import Reshaped

HF_MEANT = {
    "hidden_activation": GELU_TANH,
    "hidden_act": (),
    "altup_coef_clip": (),
    "altup_correct_scale": (True,),
    "laurel_rank": (),
}
#: Epsilon for roots of mean squares. The models divide by the roots without an epsilon.
_TINY = 1e-30


def hf_keys(config: Any) -> dict[str, Any]:
    n = config.num_hidden_layers
    parts = config.activation_sparsity_pattern or [0.95 if i < 10 < n else 0.0 for i in range(n)]
    return window_keys(config) | {
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": [NormalDist().inv_cdf(part) if part else -float("inf") for part in parts],
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Repeat the first row of the embeddings for layers for the last tokens, which have no row in checkpoints."""
    if not name.endswith("embed_tokens_per_layer.weight"):
        return array
    shape = config.vocab_size, array.shape[1]
    if array.strides[0] == 0:  # all rows are equal, as in an array that only has a shape
        return np.broadcast_to(array[:1], shape)
    return np.concatenate([array, np.broadcast_to(array[:1], (shape[0] - len(array), shape[1]))])


def record(m: Header) -> Graph:
    meta, n_layers, d, weights = m.meta, m.config.n_layers, m.config.n_embd, m.weights
    windows, heads = m.windows(period=5, default=None), m.heads()
    widths = meta.read_each("feed_forward_length", n_layers, int, low=1, high=1 << 24)
    n_own = n_layers - meta.read("attention.shared_kv_layers", int, max(0, n_layers - 20), low=0, high=n_layers - 1)
    n_per_layer = meta.read("embedding_length_per_layer_input", int, low=1, high=1 << 16)
    n = meta.read("altup.num_inputs", int, low=2, high=16)
    active = meta.read("altup.active_idx", int, low=0, high=n - 1)
    cuts = (NormalDist().inv_cdf(0.95),) * min(10, n_layers) + (-1e9,) * max(0, n_layers - 10)
    if meta.find("activation_sparsity_scale") is not None:
        cuts = meta.read_each("activation_sparsity_scale", n_layers, float, low=-float("inf"), high=10)
    rope, local_rope = make_rope(m, heads.key_dim), make_local_rope(m, heads.key_dim, 10_000.0)
    embedding: list[Tensor] = []

    def resized(at: Layer, streams: Tensor, x: Tensor) -> Tensor:
        """Scale the streams so that each has the same root mean square as x [., d]."""
        streams = at.add(ops.RMSNorm(streams, None, _TINY, n - 1))
        return at.add(ops.MixStreams(streams, at.add(ops.RootMeanSquare(x)), 1))

    def begin(at: Layer, x: Tensor) -> Tensor:
        embedding.append(x)
        projection = Reshaped(weights.require("altup_proj.weight", n - 1, d, d), ((n - 1) * d, d))
        return at.add(ops.SideBySide((x, resized(at, at.add(ops.Linear(x, g.Matrix(projection))), x))))

    def end(at: Layer, name: str, x: Tensor) -> Tensor:
        first, streams = at.add(ops.Columns(x, range(d))), at.add(ops.Columns(x, range(d, n * d)))
        streams = at.add(ops.HeadLinear(streams, weights.require("altup_unembd_proj.weight", n - 1, d, d)))
        total = at.add(ops.MixStreams(resized(at, streams, first), None, n - 1, first, offset=1.0))
        return norm(at, name, at.add(ops.Scale(total, 1 / n)))

    def coefficients(at: Layer, name: str, x: Tensor, n_made: int) -> Tensor:
        x = at.add(ops.Scale(norm(at, "altup_router_norm", x), 1 / d))
        return at.linear(at.add(ops.Activation(at.linear(x, "altup_router", n), "tanh")), name, n_made)

    def mlp(at: Layer, x: Tensor) -> Tensor:
        w, width, cut = at.weights, widths[at.number], cuts[at.number]
        gate, up = at.add(ops.Linears(x, (w.matrix("ffn_gate", d, width), w.matrix("ffn_up", d, width))))
        if cut > -10:  # else no activation is removed
            gate = at.add(ops.AboveDeviation(gate, cut))
        return at.linear(at.add(ops.Gated(gate, up, "gelu")), "ffn_down", d)

    def layer(at: Layer, streams: Tensor) -> Tensor:
        window = windows[at.number]
        sources = [i for i in range(n_own) if bool(windows[i]) == bool(window)]
        shared = sources[-1] if sources and at.number >= n_own else None
        its = range(active * d, (active + 1) * d)
        of_active = coefficients(at, "altup_predict_coef", at.add(ops.Columns(streams, its)), n * n)
        predicted = at.add(ops.MixStreams(streams, of_active, n, streams))
        first = at.add(ops.Columns(predicted, its))
        x = norm(at, "attn_norm", first)
        rank = at.weights.n_rows("laurel_l.weight")
        laurel = at.linear(at.linear(x, "laurel_l", rank), "laurel_r", d)
        laurel = add(at, norm(at, "laurel_post_norm", laurel), x)
        y = gemma4.attention(at, x, heads, local_rope if window else rope, window, shared, has_spans=False)
        y = add(at, norm(at, "post_attention_norm", y), first)
        x = at.add(ops.Scale(at.add(ops.Add(y, laurel)), 0.5**0.5))
        x = add(at, norm(at, "post_ffw_norm", mlp(at, norm(at, "ffn_norm", x))), x)
        of_new = coefficients(at, "altup_correct_coef", x, n)
        corrected = at.add(ops.MixStreams(at.add(ops.Add(first, x, -1.0)), of_new, 1, predicted, offset=1.0))
        first = at.add(ops.Columns(corrected, its))
        size = at.add(ops.RootMeanSquare(first))  # undoes the normalisation, so that only the weights remain
        scaled = at.add(ops.RMSNorm(first, at.weights.vector("altup_correct_scale", d), _TINY))
        scaled = at.add(ops.MixStreams(scaled, size, 1))
        more = gemma4.layer_embedding(at, scaled, embedding[0], weights, n_per_layer, n_layers)
        return at.add(ops.MixStreams(more, None, 1, corrected, offset=1.0, first=1))

    softcap = read_softcap(m, "final_logit_softcapping") or 30.0
    return decoder(m, layer, embedding_scale=d**0.5, change_embedding=begin, output_norm=end, softcap=softcap)
