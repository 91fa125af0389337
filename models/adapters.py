"""Low-rank adapters (LoRA, arXiv:2106.09685). A graph can use several adapters at once.

y = W x + bias becomes y + sum over adapters i of share_i * B_i A_i x. The matrices of all adapters for one product
are concatenated, so that a batch whose requests use different adapters needs only two additional products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Tensor
from localllm.models.weights import ArrayWeight, RowsOf

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory."""

    name: str  # for messages
    # A [r, n_in] and B [n_out, r], already scaled, by the name of the tensor that they change
    parts: dict[str, tuple[Array, Array]]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the matrices."""
        digest = hashlib.blake2b(digest_size=16)
        for name, matrices in sorted(self.parts.items()):
            digest.update(name.encode())
            for matrix in matrices:
                digest.update(matrix.tobytes())
        return digest.hexdigest()

    def of(self, weight: g.Weight) -> tuple[Array, Array] | None:
        """Return A and B for a weight, or for a weight that consists of rows of a tensor."""
        if not isinstance(weight, RowsOf):
            return self.parts.get(weight.name)
        matrices = self.parts.get(weight.whole.name)
        if matrices is None or len(weight.whole.shape) != 2:
            return None
        a, b = matrices
        grouped = b.reshape(weight.n_groups, -1, b.shape[1])[:, weight.rows.start : weight.rows.stop]
        return a, grouped.reshape(-1, b.shape[1])


def check(adapter: Adapter, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless the adapter fits a model with tensors of these shapes."""
    for name, (a, b) in adapter.parts.items():
        if shapes.get(name) != (b.shape[0], a.shape[1]) or len(a) != b.shape[1]:
            has = f"is {list(shapes[name])} here" if name in shapes else "this model has not"
            raise ModelError(
                f"the adapter {quoted(adapter.name)} is for another model: it changes {quoted(name)} by a matrix "
                f"{[b.shape[0], a.shape[1]]}, which {has}"
            )


def with_adapters(graph: Graph, adapters: Sequence[Adapter]) -> Graph:
    """Return the graph with the adapters' products added.

    A batch defines the share of each adapter (`localllm.kernels.backend.Batch.adapters`).
    """
    new = Graph(graph.cache_type, caches=graph.caches, states=graph.states, windows=graph.windows)
    now: dict[g.Value, g.Value] = {}
    shares: dict[tuple[Any, ...], Tensor] = {}
    unused = {(i, name) for i, adapter in enumerate(adapters) for name in adapter.parts}
    for node in graph.nodes:
        new.layer = node.layer
        operation = node.operation.with_inputs(now)
        new.add(operation)
        now |= dict(zip(node.operation.results, operation.results, strict=True))
        if not isinstance(operation, ops.Linear | ops.Linears) or operation.x.rows is not g.Rows.TOKENS:
            continue
        matrices = (operation.matrix,) if isinstance(operation, ops.Linear) else operation.matrices
        for matrix, was in zip(matrices, node.operation.results, strict=True):
            matches = [(i, ab) for i, adapter in enumerate(adapters) if (ab := adapter.of(matrix.weight)) is not None]
            if not matches:
                continue
            name = matrix.weight.whole.name if isinstance(matrix.weight, RowsOf) else matrix.weight.name
            unused -= {(i, name) for i, _ in matches}
            ranks = tuple((i, len(a)) for i, (a, _) in matches)
            if (node.layer, ranks) not in shares:  # separate for each layer, because a model is split between layers
                shares[node.layer, ranks] = new.add(ops.AdapterWeights(ranks))
            a = ArrayWeight(f"{matrix.weight.name}.lora_a", np.concatenate([a for _, (a, _) in matches]))
            b = ArrayWeight(f"{matrix.weight.name}.lora_b", np.concatenate([b for _, (_, b) in matches], axis=1))
            gated = ops.Gated(new.add(ops.Linear(operation.x, g.Matrix(a))), shares[node.layer, ranks], "identity")
            h = new.add(gated)
            result = now[was]
            assert isinstance(result, Tensor)
            now[was] = new.add(ops.Linear(h, g.Matrix(b), residual=result))
    if unused:
        i, name = min(unused)
        raise ModelError(
            f"the adapter {quoted(adapters[i].name)} changes {quoted(name)}, which cannot be changed while a model "
            "runs: write a model that contains the adapter with localllm merge"
        )
    new.watched = {now.get(x, x) for x in graph.watched}
    new.names = {name: named.in_graph(now) for name, named in graph.names.items()}
    return new
