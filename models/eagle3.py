"""EAGLE-3 drafters (arXiv:2503.01840): one layer that drafts from hidden states of three layers of the target model.

The target model's step projects these hidden states to one row (``fc``). From this row and the embedding of the
following token, the drafter's layer computes a hidden state. The drafter's head, often with a smaller vocabulary,
predicts a draft from it. For the next draft, the hidden state takes the place of the target's row.

Source: llama.cpp's ``eagle3``, whose converter defines the names of keys and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Rows, Tensor
from localllm.kernels.operations import Embed, Input, Linear, Outputs, RMSNorm, SideBySide
from localllm.models import llama
from localllm.models.blocks import Layer, attention, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, interleave_query_and_key, rope_factors
from localllm.models.rope import make_rope
from localllm.models.target import before_outputs, check_target, layer_inputs, read_ends, read_layers, read_token_ids

HF_NAMES = {"fc": "fc", "hidden_norm": "attn_norm_2", "input_norm": "enc.output_norm"}
HF_MEANT = dict.fromkeys(("draft_vocab_size", "target_model_type", "modal_type"), ())


def hf_keys(config: Any) -> dict[str, Any]:
    target = config.target
    layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    layers = list(layers or (2, target.n_layers // 2, target.n_layers - 3))
    check_target(config, len(layers))
    return llama.hf_keys(config) | {
        "target_layers": layers,
        "target_hidden_size": getattr(config, "target_hidden_size", None) or target.n_embd,
        "norm_before_residual": bool(getattr(config, "norm_before_residual", False)),
        "norm_before_fc": bool(getattr(config, "norm_before_fc", False)),
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | Mapping[str, Array]:
    # `hf_extra` computes the file's d2t. t2d is the inverse mapping.
    return {} if name in ("d2t", "t2d") else interleave_query_and_key(name, array, config)


def hf_extra(config: Any) -> Mapping[str, Array]:
    """Return the target's ids of the drafter's tokens. Checkpoints contain their offsets from the drafter's ids."""
    factors = rope_factors(config)
    if "d2t" not in config.tensors:
        return factors
    ahead = config.tensors["d2t"].values().reshape(-1).astype(np.int64)
    return {**factors, "d2t": ahead + np.arange(len(ahead))}


def record(m: Header) -> Graph:
    """Record a graph from rows [T, d] of the target's hidden states and the following token ids to logits of drafts.

    The computation of the rows is recorded in the target model's graph (`Header.target`), which watches them. Without
    a target and without an embedding table, the input also contains the embeddings [T, 2 d]. Without a head, the
    graph ends before the head.
    """
    w, d = m.weights, m.config.n_embd
    if m.config.n_layers != 1:
        raise ModelError(f"eagle3.block_count is {m.config.n_layers}, but an EAGLE-3 drafter has one layer")
    _record_rows(m)
    table, head = read_ends(w, d, m.config.n_vocab, m.target)
    graph = Graph(m.cache_type, token_ids=read_token_ids(w, m.config.n_vocab))
    n_columns = d if table is not None else 2 * d
    h = graph.add(Input(Tensor(Rows.TOKENS, d), 0, n_columns))
    e = graph.add(Embed(table) if table is not None else Input(Tensor(Rows.TOKENS, d), d, n_columns))
    graph.layer = 0
    at = Layer(0, graph, w.layer(0), d, m.norm_eps, e)
    normed = norm(at, "attn_norm_2", h)
    residual = normed if m.meta.read("norm_before_residual", bool, False) else h
    heads = m.heads()
    x = at.add(SideBySide((norm(at, "attn_norm", e), normed)))
    x = attention(at, x, heads, make_rope(m, heads.key_dim, interleaved=True), residual=residual)
    x = gated_mlp(at, norm(at, "ffn_norm", x), m.mlp_width(), residual=x)
    graph.layer = "output"
    x = norm(Layer(-1, graph, w, d, m.norm_eps, e), "output_norm", graph.add(Outputs(x)))
    if head is not None:
        graph.add(Linear(x, Matrix(head)))
    return graph


def _record_rows(m: Header) -> None:
    """Record the drafter's input rows [T, d] in the target's graph: a matrix times the inputs of several layers."""
    w, target, numbers = m.weights, m.target, read_layers(m.meta)
    width = m.meta.read("target_hidden_size", int, low=1, high=1 << 20)
    has_norm = m.meta.read("norm_before_fc", bool, False)
    fc = w.matrix("fc", len(numbers) * width, m.config.n_embd)
    fc_norm = w.vector("enc.output_norm", len(numbers) * width) if has_norm else None
    if target is None or target.watched:  # already recorded if the drafter is read a second time
        return
    with before_outputs(target):
        x = layer_inputs(target, numbers, width)
        if fc_norm is not None:
            x = target.add(RMSNorm(x, fc_norm, m.norm_eps))
        target.watched.add(target.add(Linear(x, fc)))
