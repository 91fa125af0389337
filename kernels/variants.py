"""Variants of a graph, which compute the same operations over the same weights, and therefore the same bits.

`graph_variant` lets the host read and change named values (`localllm.kernels.graph.Graph.names`). It only adds
operations: copies of the values to read, and `HostEdit` where the host changes a value. `head_graph` is the part of a
graph after the last layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from localllm.errors import KernelError
from localllm.kernels.graph import Graph, Tensor, Value
from localllm.kernels.operations import Add, HostEdit, Input, Scale


def graph_variant(graph: Graph, watched: Collection[str], edited: Collection[str]) -> tuple[Graph, dict[str, Value]]:
    """Return a graph that also keeps the values ``watched`` and lets the host change the values ``edited``.

    Also returns the watched value of each name, for `localllm.kernels.backend.Step.value`. A value that is read and
    changed is read after the change.
    """
    new = graph.empty()
    renewed: dict[Value, Value] = {}
    copies: dict[Value, Tensor] = {}
    values: dict[str, Value] = {}
    names: dict[Value, list[str]] = defaultdict(list)
    for name in graph.names:
        if name in watched or name in edited:
            names[graph.names[name].value].append(name)
    layer_of = {value: node.layer for node in graph.nodes for value in node.operation.results}
    # Layer of the values that need a base. The device of this layer copies the base.
    bases = {graph.names[name].base: layer_of[value] for value, of_value in names.items() for name in of_value}

    def copy_of(value: Value) -> Tensor:
        """Return a copy of the current value, which later operations do not overwrite."""
        if value not in copies:
            x = renewed[value]
            assert isinstance(x, Tensor)
            copies[value] = new.add(Scale(x))
        return copies[value]

    def edit(name: str, value: Value) -> None:
        if name not in edited:
            return
        x, base = renewed[value], graph.names[name].base
        if not isinstance(x, Tensor):
            raise KernelError(f"{name} are numbers of experts, which cannot be changed: change the router's logits")
        renewed[value] = new.add(HostEdit(x, name, None if base is None else copies[base]))

    def watch(name: str, value: Value) -> None:
        if name not in watched:
            return
        x, base = renewed[value], graph.names[name].base
        if not isinstance(x, Tensor) or value is graph.result:  # kept without a copy
            values[name] = x
        else:
            values[name] = copy_of(value) if base is None else new.add(Add(copies[base], x, -1.0))

    for node in graph.nodes:
        new.layer = node.layer
        operation = node.operation.with_inputs(renewed)
        new.add(operation)
        renewed |= dict(zip(node.operation.results, operation.results, strict=True))
        for value in node.operation.results:
            blocks = [name for name in names.get(value, ()) if graph.names[name].base is not None]
            others = [name for name in names.get(value, ()) if graph.names[name].base is None]
            # A change of the residual stream after a block does not belong to the block's output.
            for name in blocks:
                edit(name, value)
                watch(name, value)
            for name in others:
                edit(name, value)
            if value in bases:
                new.layer = bases[value]
                copy_of(value)
                new.layer = node.layer
            for name in others:
                watch(name, value)
    new.watched = {renewed[x] for x in graph.watched if x in renewed} | set(values.values())
    return new, values


def head_graph(graph: Graph) -> Graph:
    """Return the operations after the last layer, which compute logits [N, n_vocab].

    The input is the residual stream after the last layer, [T, width].
    """
    stream = graph.names[f"layers.{graph.n_layers - 1}.output"].value
    assert isinstance(stream, Tensor)
    first = 1 + max(i for i, node in enumerate(graph.nodes) if stream in node.operation.results)
    new = graph.empty()
    new.layer = "output"
    renewed: dict[Value, Value] = {stream: new.add(Input(Tensor(stream.rows, stream.width)))}
    for node in graph.nodes[first:]:
        operation = node.operation.with_inputs(renewed)
        new.add(operation)
        renewed |= dict(zip(node.operation.results, operation.results, strict=True))
    return new
