"""Names and shapes of the values in a model's forward pass, as text and as a diagram."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import groupby
from typing import NamedTuple

from localllm.errors import Argument, UsageError
from localllm.kernels.graph import Graph, Routing, Rows, Value

_LAYER = re.compile(r"layers\.(\d+)\.")


class ValueShape(NamedTuple):
    """Shape of a named value, float32 [rows, width]; of chosen experts, int32 [rows, width]."""

    rows: str  # "n_tokens", or "n_outputs" for values of tokens with logits
    width: int
    is_choice: bool = False  # whether the values are numbers of chosen experts

    def __str__(self) -> str:
        return f"[{self.rows}, {self.width:,}]"


class ValueNames(Mapping[str, ValueShape]):
    """The shapes of a model's values by name, in execution order. As text, a list of all names."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._shapes = {name: _shape(named.value) for name, named in graph.names.items()}

    def __getitem__(self, name: str) -> ValueShape:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def matching(self, argument: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
        """Return the names that match patterns, in execution order. ``*`` in a pattern matches any layer or name.

        Raises:
            UsageError: a pattern matches no name; ``argument`` is its name in the message.
        """
        texts = [patterns] if isinstance(patterns, str) else patterns
        texts = [*texts] if isinstance(texts, Iterable) else [None]
        if not texts or not all(isinstance(pattern, str) for pattern in texts):
            raise UsageError.of(argument, patterns, "a name of a value, or a list of names")
        matches: set[str] = set()
        for pattern in texts:
            parts = map(re.escape, re.split(r"\*+", pattern))
            expression = re.compile("[^.]*".join(parts))
            names = {name for name in self if expression.fullmatch(name)}
            if not names:
                words = f": the model has no value {pattern!r:.80}; the nearest names are {self._nearest(pattern)}"
                raise UsageError(Argument(argument), words, ", and LLM.graph lists all names")
            matches |= names
        return tuple(name for name in self if name in matches)

    def _nearest(self, pattern: str) -> str:
        """Return the three names most similar to a name that the model lacks, with its layer if this layer exists."""
        written = re.match(r"\w+\.(\d{1,9})\.", pattern)
        first = f"layers.{written[1]}." if written else ""
        names = [name for name in self if not _LAYER.match(name) or name.startswith(first or "*")]
        if not any(map(_LAYER.match, names)):
            names = [*dict.fromkeys(_LAYER.sub("layers.*.", name) for name in self)]
        return ", ".join(get_close_matches(pattern[:80], names, n=3, cutoff=0) or names[:3])

    def _layers(self) -> list[tuple[range, dict[str, ValueShape]]]:
        """Return the runs of equal layers, and the shapes of the names in such a layer."""
        layers: dict[int, dict[str, ValueShape]] = defaultdict(dict)
        for name, shape in self.items():
            if match := _LAYER.match(name):
                layers[int(match[1])][name[match.end() :]] = shape
        runs = []
        for _, run in groupby(layers, key=lambda number: [*layers[number].items()]):
            numbers = [*run]
            runs.append((range(numbers[0], numbers[-1] + 1), layers[numbers[0]]))
        return runs

    def _lines(self) -> Iterator[str]:
        width = max(map(len, (re.sub(_LAYER, "  ", name) for name in self)), default=0)
        outside = [(name, shape) for name, shape in self.items() if not _LAYER.match(name)]
        before = [item for item in outside if item[0] == "embedding"]
        yield from (f"{name:<{width}}  {shape}" for name, shape in before)
        for numbers, shapes in self._layers():
            first, last = numbers[0], numbers[-1]
            yield f"layers.{first}" if first == last else f"layers.{first} to layers.{last}"
            yield from (f"  {name:<{width - 2}}  {shape}" for name, shape in shapes.items())
        yield from (f"{name:<{width}}  {shape}" for name, shape in outside if (name, shape) not in before)

    def mermaid(self) -> str:
        """Return a flowchart of the values in Mermaid's notation. Of equal layers, it shows the first."""
        run_of = {number: numbers for numbers, _ in self._layers() for number in numbers}
        names: dict[Value, list[str]] = defaultdict(list)
        for name, named in self._graph.names.items():
            names[named.value].append(name)

        def node(value: Value) -> str:
            """Return the node of a value: the node of the first equal layer's value with this name."""
            first_layer = _LAYER.sub(lambda match: f"layers.{run_of[int(match[1])][0]}.", names[value][0])
            return re.sub(r"\W", "_", first_layer)

        sources: dict[Value, set[str]] = {}  # nodes that an unnamed value is computed from
        edges: dict[tuple[str, str], None] = {}
        for operation in (node.operation for node in self._graph.nodes):
            inputs = set().union(*(sources[x] for x in operation.inputs))
            for value in operation.results:
                sources[value] = inputs
                if value in names:
                    edges |= {(source, node(value)): None for source in sorted(inputs) if source != node(value)}
                    sources[value] = {node(value)}
        return "\n".join(["flowchart TD", *self._boxes(names, run_of), *(f"  {a} --> {b}" for a, b in edges)])

    def _boxes(self, names: Mapping[Value, list[str]], run_of: Mapping[int, range]) -> Iterator[str]:
        """Yield the nodes of the diagram, each once. A node shows all names of its value."""
        for value_names in names.values():
            match = _LAYER.match(value_names[0])
            if match and run_of[int(match[1])][0] != int(match[1]):
                continue
            # The input of a layer is also the output of the layer before it.
            prefix = match[0] if match else ""
            title = ", ".join(name.removeprefix(prefix) for name in value_names if name.startswith(prefix))
            where = ""
            if match:
                run = run_of[int(match[1])]
                where = f"layers {run[0]} to {run[-1]}: " if len(run) > 1 else f"layer {run[0]}: "
            identifier = re.sub(r"\W", "_", value_names[0])
            yield f'  {identifier}["{where}{title}<br>{self[value_names[0]]}"]'


def _shape(value: Value) -> ValueShape:
    if isinstance(value, Routing):
        return ValueShape("n_tokens", value.k, is_choice=True)
    return ValueShape("n_outputs" if value.rows is Rows.OUTPUTS else "n_tokens", value.width)
