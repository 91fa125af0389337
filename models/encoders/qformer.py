"""Q-Formers (arXiv:2301.12597), whose queries attend to the rows of their window. A window and its queries are
neighbouring rows of one sequence, and flags mark both kinds of rows.
"""

from __future__ import annotations

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, KVCache, Matrix, Tensor
from localllm.kernels.operations import Activation, Attention, Linear, RopeAppend, SideBySide
from localllm.models.blocks import Layer, layer_norm
from localllm.models.encoders.encoder import FrameRows, Pixels
from localllm.models.encoders.sam import WithConstants, WithWaves

#: Epsilon of norms.
EPS = 1e-12
#: Columns of flags: whether a row is of the window or a query.
FLAGS = 16

#: Names of tensors in the layers, and in llama.cpp's files.
NAMES = {
    "intermediate_query.dense": "ffn_up",
    "output_query.dense": "ffn_down",
    "output_query.LayerNorm": "ffn_norm",
}
for theirs, ours in (("attention", "self_attn"), ("crossattention", "cross_attn")):
    NAMES |= {f"{theirs}.attention.{name}": f"{ours}_{name[0]}" for name in ("query", "key", "value")}
    NAMES |= {f"{theirs}.output.dense": f"{ours}_out", f"{theirs}.output.LayerNorm": f"{ours}_norm"}


def make_cache(graph: Graph, width: int, head_dim: int) -> KVCache:
    if not head_dim or width % head_dim:
        raise ModelError(f"{width} values are not heads of {head_dim} values: the file is broken")
    return graph.kv_cache(width // head_dim, head_dim + FLAGS, head_dim)


def layer(at: Layer, y: Tensor, x: Tensor, is_of_window: Tensor, is_query: Tensor, cache: KVCache) -> Tensor:
    """Record a layer of the queries y, which see each other and the rows of their window in x."""
    y = _attention(at, "self_attn", y, y, is_of_window, cache)
    y = _attention(at, "cross_attn", y, x, is_query, cache)
    z = at.add(Activation(at.linear(y, "ffn_up", at.weights.n_rows("ffn_up.weight")), "gelu_erf"))
    return layer_norm(at, "ffn_norm", at.linear(z, "ffn_down", y.width, residual=y))


def _attention(at: Layer, name: str, y: Tensor, seen: Tensor, unseen: Tensor, cache: KVCache) -> Tensor:
    """Record attention of y to the rows ``seen`` except rows with the flag ``unseen``, and a norm."""
    d, n, dim = y.width, cache.n_heads, cache.value_dim
    query, key, value = (
        at.weights.matrix(f"{name}_{part}", x.width, d, bias=True)
        for part, x in zip("qkv", (y, seen, seen), strict=True)
    )
    query = Matrix(*(WithWaves(part, n, (), 0) for part in (query.weight, query.bias) if part is not None))
    key = Matrix(*(WithConstants(part, n, 0, FLAGS) for part in (key.weight, key.bias) if part is not None))
    q, k = at.add(Linear(y, query)), at.add(Linear(at.add(SideBySide((seen, unseen))), key))
    q = at.add(RopeAppend(q, k, at.add(Linear(seen, value)), cache, None, None, None))
    z = at.add(Attention(q, cache, dim**-0.5, causal=False, has_spans=True))
    return layer_norm(at, f"{name}_norm", at.linear(z, f"{name}_out", d, residual=y))


def window_rows(windows: Pixels, queries: Pixels) -> FrameRows:
    """Return each window's rows followed by its queries, with flags. The queries are the outputs.

    Args:
        windows: [n, rows of a window, width].
        queries: [n, queries of a window, width].
    """
    n, size, width = windows.shape
    total = size + queries.shape[1]
    inputs = np.zeros((n, total, width + 2 * FLAGS), np.float32)
    inputs[:, :, :width] = np.concatenate([windows, queries], axis=1)
    inputs[:, :size, width + FLAGS - 1] = 1
    inputs[:, size:, -1] = 1
    numbers = np.arange(n * total, dtype=np.int32).reshape(n, total)
    starts = np.repeat(numbers[:, 0], total)
    spans, axes = np.stack([starts, starts + total]).astype(np.int32), np.zeros((3, n * total), np.int32)
    return FrameRows(inputs.reshape(n * total, -1), axes, np.ascontiguousarray(numbers[:, size:].ravel()), spans)
