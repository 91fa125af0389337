"""Attention probabilities of a layer's heads, computed from its named queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError
from localllm.kernels.graph import Graph, HeadNorm
from localllm.kernels.operations import Attention, RopeAppend
from localllm.kernels.reference import position_factors, rotated_heads, soft_capped, softmax
from localllm.models.weights import floats

Array = NDArray[Any]


@dataclass(frozen=True)
class AttentionLayer:
    """The operations of a layer's attention. Their weights belong to an open file.

    Attributes:
        query: norms and rotates the queries.
        key: norms and rotates the keys. It belongs to another layer if layers share keys.
        queries, keys: names of the values before norms and rotation.
    """

    attention: Attention
    query: RopeAppend
    key: RopeAppend
    queries: str
    keys: str

    @classmethod
    def find(cls, graph: Graph, layer: int) -> AttentionLayer:
        """Return the attention of a layer.

        Raises:
            UsageError: the layer does not exist, has no softmax attention, or attends to selected or compressed
                positions, which are not named values.
        """
        if not 0 <= layer < graph.n_layers:
            raise UsageError(f"layer {layer} does not exist: the layers are 0 to {graph.n_layers - 1}")
        operations = (node.operation for node in graph.nodes)
        appends = {op.result: op for op in operations if isinstance(op, RopeAppend)}
        of_layers = dict[int, Attention]()
        for node in graph.nodes:
            operation, name = node.operation, f"layers.{node.layer}.queries"
            if isinstance(operation, Attention) and isinstance(node.layer, int) and operation.q in appends:
                named = graph.names.get(name)
                if named is not None and named.value is appends[operation.q].q:
                    of_layers.setdefault(node.layer, operation)
        if layer not in of_layers:
            numbers = ", ".join(map(str, of_layers)) or "none"
            raise UsageError(f"layer {layer} has no softmax attention: choose among the layers with it ({numbers})")
        attention = of_layers[layer]
        key = next((a for a in appends.values() if a.k is not None and a.cache.key == attention.cache.key), None)
        name = "" if key is None else f"layers.{key.cache.layer}.keys"
        named = graph.names.get(name)
        if attention.selected is not None or attention.entries is not None or key is None or named is None:
            raise UsageError(
                f"layer {layer} attends to selected or compressed positions, whose probabilities cannot be computed: "
                "choose another layer"
            )
        return cls(attention, appends[attention.q], key, f"layers.{layer}.queries", name)

    def probabilities(self, queries: Array, keys: Array, head: int) -> NDArray[np.float32]:
        """Return the probabilities of a head, [n_tokens, n_tokens]: a row for each query, a column for each key.

        Args:
            queries, keys: values at all tokens of a prompt, [n_tokens, width], by the names of this object.
            head: number of the query head.
        """
        op, positions = self.attention, np.arange(len(queries), dtype=np.int32)
        q = _rotated(queries, head, self.query, self.query.q_norm)
        if self.query.q_scale is not None:
            q = q * position_factors(self.query.q_scale, positions)[:, None]
        k = _rotated(keys, head // op.group_size, self.key, self.key.k_norm)
        scores = q @ k.T * np.float32(op.scale)
        distances = positions[:, None] - positions  # from the key to the query
        if op.softcap is not None:
            scores = soft_capped(scores, op.softcap)
        if op.slopes is not None:
            scores -= floats(op.slopes)[head] * np.abs(distances)
        if op.biases is not None:
            n = op.bias_width // 2
            scores += floats(op.biases).reshape(op.n_heads, -1)[head][n + np.clip(-distances, -n, n)]
        scores = np.where(_is_visible(op, positions, distances), scores, -np.inf)
        if op.sinks is not None:
            sinks = np.full((len(scores), 1), floats(op.sinks)[head])
            scores = np.concatenate([scores, sinks], axis=1)
        return softmax(scores)[:, : len(keys)].astype(np.float32)


def _rotated(rows: Array, head: int, op: RopeAppend, norm: HeadNorm | None) -> Array:
    """Return a head of queries or keys, normed and rotated: [n_tokens, key_dim]."""
    weight = None if norm is None or norm.weight is None else floats(norm.weight)
    dim, turns = op.cache.key_dim, np.arange(len(rows), dtype=np.int32)[:, None]
    of_head = rows[:, head * dim : (head + 1) * dim]
    return rotated_heads(of_head, dim, norm, weight, op.rope, turns, norm_last=op.norm_last)[:, 0]


def _is_visible(op: Attention, positions: NDArray[np.int32], distances: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return whether each query [n] sees each key, [n, n]; see `localllm.kernels.operations.Attention`."""
    visible = distances >= 0 if op.causal else np.ones(distances.shape, np.bool_)
    if op.window is not None:
        visible &= np.abs(distances) < op.window
    if op.chunk is not None:
        visible &= positions[:, None] // op.chunk == positions // op.chunk
    return visible
