"""The block for multi-token prediction (``nextn``) after a model's last layer.

From the hidden state of a token, which is the input of the model's head, and the embedding of the following token,
the block computes the following token's hidden state. The block's head predicts a draft from it. With its own hidden
states as input, the block predicts further drafts. If a file contains several blocks, only the first is used, as in
llama.cpp for DeepSeek's files.

Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Rows, Tensor
from localllm.kernels.operations import Columns, Embed, Input, Linear, Outputs, RMSNorm, SideBySide
from localllm.models.config import Header
from localllm.models.weights import floats, split_columns

#: Records the layer of a block, from its number, the graph, the embedding and x [T, d], and returns the next x.
RecordBlock = Callable[[int, Graph, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HiddenNorm:
    """The RMSNorm between the last layer and the head of a model or a block."""

    weight: NDArray[np.float32]
    eps: float

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        scale = 1 / np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True) + np.float32(self.eps))
        normed: NDArray[np.float32] = (rows * scale * self.weight).astype(np.float32)
        return normed


def hidden_states(graph: Graph) -> Tensor:
    """Return a model's hidden states [T, d] before the head's norm, and make them readable after a step."""
    x = next(node.operation.x for node in graph.nodes if isinstance(node.operation, Outputs))
    graph.watched.add(x)
    return x


def hidden_norm(graph: Graph) -> HiddenNorm:
    """Return the norm before a graph's head, with its weight read from the file."""
    norms = [node.operation for node in graph.nodes if node.layer == "output" and isinstance(node.operation, RMSNorm)]
    if len(norms) != 1 or norms[0].weight is None:
        raise ModelError("a block that predicts further tokens needs a model with an RMSNorm before its head")
    weight = norms[0].weight
    return HiddenNorm(floats(weight).reshape(-1).astype(np.float32), norms[0].eps)


def record_block(
    m: Header,
    record: RecordBlock,
    embedding_scale: float,
    eps: float,
    n_streams: int = 1,
    mix: Callable[[Graph, Tensor], Tensor] = lambda graph, x: x,
) -> Graph:
    """Record a graph from hidden states [T, n_streams * d] and the following token ids to the logits of drafts.

    The hidden states of a model with one stream are normed. ``mix`` combines several streams before the head's norm.
    """
    config, number = m.config, m.config.n_layers
    d, w, g = config.n_embd, m.weights.layer(number), Graph(m.cache_type)
    table = w.find("nextn.embed_tokens.weight", config.n_vocab, d)
    table = m.weights.require("token_embd.weight", config.n_vocab, d) if table is None else table
    head = w.find("nextn.shared_head_head.weight", config.n_vocab, d)
    norm = w.find("nextn.shared_head_norm.weight", d)
    h = g.add(Input(Tensor(Rows.TOKENS, n_streams * d)))
    e = g.add(Embed(table, embedding_scale))
    g.layer = 0
    of_e, of_h = split_columns(w.require("nextn.eh_proj.weight", d, 2 * d))
    x = g.add(Linear(g.add(RMSNorm(e, w.vector("nextn.enorm", d), eps)), Matrix(of_e)))
    h = g.add(RMSNorm(h, w.vector("nextn.hnorm", d), eps, n_streams))
    streams = [h] if n_streams == 1 else [g.add(Columns(h, range(i * d, i * d + d))) for i in range(n_streams)]
    streams = [g.add(Linear(stream, Matrix(of_h), residual=x)) for stream in streams]
    x = record(number, g, e, streams[0] if n_streams == 1 else g.add(SideBySide(tuple(streams))))
    g.layer = "output"
    y = mix(g, g.add(Outputs(x)))
    y = g.add(RMSNorm(y, m.weights.vector("output_norm", d) if norm is None else norm, eps))
    g.add(Linear(y, _head(m, d) if head is None else Matrix(head)))
    return g


def _head(m: Header, d: int) -> Matrix:
    return m.weights.matrix("output", d, m.config.n_vocab, tied_to="token_embd")
