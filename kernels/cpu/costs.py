"""Work of a graph's operations in a step, counted by family of kernels.

Operations of a family take time in proportion to a count, in every model:

    matrix products    by format of the weights: bytes of weights for all tokens, multiply-adds for each token
    attention          by the sizes and types of heads: positions that a token sees
    other operations   by their arguments: rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.cpu.tiles import TILES, TOKENS
from localllm.kernels.cpu.weights import packed_bytes
from localllm.kernels.graph import Graph, LayerTag, Operation, Rows, Tensor, Value, Weight
from localllm.kernels.operations.attention import n_visible
from localllm.quant.repack import repack_target
from localllm.quant.types import GGMLType

#: Operations that a backend computes before its program runs.
_BEFORE = (ops.Embed, ops.Input, ops.NgramEmbed, ops.AdapterWeights)


class OperationCost(NamedTuple):
    """Work of an operation in a step.

    ``once`` is the work that all rows share, and ``per_row`` the work of one of ``n_rows`` rows.  ``sample`` is the
    operation to measure, or the type of a matrix in the file.  A row of a matrix product has ``n_inputs`` values that
    are quantised for the product, and ``n_outputs`` results.
    """

    family: str
    layer: LayerTag
    sample: Operation[Any] | GGMLType
    n_rows: float
    once: float
    per_row: float
    n_waits: int = 0  # instructions for which all threads wait, if the family's unit does not include them
    n_inputs: int = 0
    n_outputs: float = 0

    @property
    def is_product(self) -> bool:
        """Whether the operation is a matrix product, whose work per row is counted in multiply-adds."""
        return not isinstance(self.sample, Operation)


def costs(graph: Graph, n_tokens: int, depth: int, n_outputs: int = 1) -> Iterator[OperationCost]:
    """Yield the work of each operation for ``n_tokens`` tokens of a sequence with ``depth`` tokens in the cache."""
    quantised = set[Value]()  # inputs of earlier products
    for node in graph.nodes:
        op = node.operation
        if isinstance(op, _BEFORE):
            continue
        result = op.results[0]
        n_rows = n_outputs if isinstance(result, Tensor) and result.rows is Rows.OUTPUTS else n_tokens
        if isinstance(result, Tensor) and result.rows is Rows.CHOSEN:
            n_rows *= graph.n_chosen()
        if not n_rows:
            continue
        if weights := _matrices(op):
            k = op.routing.k if isinstance(op, ops.ExpertLinears | ops.ExpertOutput) else 0
            for weight in weights:
                is_first = op.inputs[0] not in quantised
                quantised.add(op.inputs[0])
                yield _product(weight, node.layer, n_tokens if k else n_rows, k, is_first)
        elif isinstance(op, ops.Attention | ops.IndexSelect):
            n_seen = _n_seen(op, n_tokens, depth)
            yield OperationCost(family(op), node.layer, op, n_rows, n_seen, n_seen, n_waits=2)
        else:
            yield OperationCost(family(op), node.layer, op, n_rows, 1, 1)


def _product(weight: Weight, layer: LayerTag, n_rows: float, k: int, is_first: bool) -> OperationCost:
    """Return the work of a product with a matrix, with all matrices of heads, or with ``k`` experts per token."""
    *n_matrices, n_out, n_in = weight.shape
    n, format = float(math.prod(n_matrices)), repack_target(weight.type)
    if k:
        n_pairs = n_rows * k
        # experts that at least one token uses, if all are equally likely
        n = float(k) if n_rows == 1 else n * (1 - (1 - k / n) ** n_rows)
        n_rows = 1 if n_rows == 1 else n_pairs / n + (TOKENS - 1) / 2  # experts compute whole tiles of tokens
    n_bytes, n_inputs = n * packed_bytes((n_out, n_in), format), n_in if is_first and format in TILES else 0
    n_waits = is_first + (n_inputs > 0)
    sizes = n_rows, n_bytes, n * n_out * n_in, n_waits, n_inputs, n * n_out
    return OperationCost(f"matrix {format.name}", layer, weight.type, *sizes)


def _matrices(op: Operation[Any]) -> tuple[Weight, ...]:
    """Return the weights of matrix products."""
    match op:
        case ops.Linear():
            return (op.matrix.weight,)
        case ops.Linears():
            return tuple(matrix.weight for matrix in op.matrices)
        case ops.HeadLinear():
            return (op.weight,)
        case ops.ExpertLinears():
            return op.experts
        case ops.ExpertOutput():
            return (op.experts,)
    return ()


def _n_seen(op: ops.Attention | ops.IndexSelect, n_tokens: int, depth: int) -> float:
    """Return the mean number of entries of the cache that a token reads."""
    of_all = n_visible(None, depth, n_tokens)
    if isinstance(op, ops.IndexSelect):
        return of_all / op.run / op.cache.stride
    reach = op.window or op.chunk
    if op.entries is not None:
        entries = of_all / op.entries.stride
        return n_visible(reach, depth, n_tokens) + min(entries, op.n_selected or entries)
    return n_visible(min((n for n in (reach, op.n_selected) if n), default=None), depth, n_tokens)


def family(op: Operation[Any]) -> str:
    """Return the family of an operation without matrices: the name, and the arguments that affect the speed."""
    words = (_word(getattr(op, argument.name)) for argument in fields(op))
    return " ".join([op.method(), *filter(None, words)])


def _word(value: Any) -> str:
    match value:
        case Tensor():
            return str(value.width)
        case g.KVCache():
            return f"{value.n_heads}x{value.key_dim}/{value.value_dim}:{value.type}"
        case g.RecurrentState():
            return "x".join(map(str, value.shape))
        case g.Rope():
            return f"rope{len(value.frequencies)}"
        case g.HeadNorm():
            return "norm"
        case tuple():
            return ",".join(map(_word, value))
        case bool() | int() | str():
            return str(value)
        case _ if hasattr(value, "drop_pages"):
            return "weight"
        case _:  # numbers that the kernel receives when it runs
            return ""
