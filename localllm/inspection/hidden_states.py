"""Hidden states of models that generate text, as embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.probe import Probe
from localllm.errors import Argument, UsageError
from localllm.inspection.names import ValueNames
from localllm.inspection.positions import Positions, select
from localllm.inspection.trace import Trace, TracedPrompt
from localllm.options.checks import as_int

#: Vector of each text: the mean of its tokens' rows, or the row of its first or last token.
PoolingKind = Literal["mean", "first", "last"]
_POSITIONS: dict[str, Positions] = {"mean": None, "first": 0, "last": -1}


class HiddenStates:
    """Computes embeddings from a value inside a model, as `localllm.generation.embedding.Embedder` does."""

    is_reranker = is_late = False

    def __init__(self, engine: Engine, layer: int | str | None, pooling: PoolingKind | None) -> None:
        """
        Args:
            layer: number of a layer, negative from the end, whose output is used; or the name of a value. Defaults to
                "final_norm".
            pooling: defaults to "mean".

        Raises:
            UsageError: an argument is invalid.
        """
        if pooling is not None and not (isinstance(pooling, str) and pooling in _POSITIONS):
            raise UsageError.of("pooling", pooling, f"one of {', '.join(map(repr, _POSITIONS))}")
        self._names = ValueNames(engine.graph)
        self._name = _value_name(self._names, "final_norm" if layer is None else layer)
        self._positions = _POSITIONS[pooling or "mean"]
        self.width = self._names[self._name].width

    def vectors(self, engine: Engine, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return embeddings [n, width] of tokenized texts."""
        trace = self._trace(engine, texts, self._positions)
        totals = np.zeros((len(texts), self.width))
        for piece in trace.pieces():
            # One row at a time: the sizes of pieces depend on other requests, and sums on the order of additions.
            for row in piece.values[self._name]:
                totals[piece.prompt] += row
        counts = np.array([len(prompt.positions) for prompt in trace.prompts])
        return np.asarray(totals / counts.reshape(-1, 1), np.float32)

    def token_vectors(self, engine: Engine, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the rows [n_tokens, width] of each text, without pooling."""
        return [values[self._name] for values in self._trace(engine, texts, None).arrays()]

    def _trace(self, engine: Engine, texts: Sequence[Sequence[int]], positions: Positions) -> Trace:
        prompts = [TracedPrompt([*ids], select(positions, len(ids)), Probe(watched=(self._name,))) for ids in texts]
        return Trace(engine, prompts, self._names, is_list=True)


def _value_name(names: ValueNames, layer: int | str) -> str:
    """Return the name of the value that ``layer`` selects."""
    if isinstance(layer, str):
        matches = names.matching("layer", layer)
        if len(matches) > 1:
            raise UsageError(Argument("layer"), f" is {layer!r:.80}, which names {len(matches)} values: name one")
        if names[matches[0]].is_choice:
            words = f" is {layer!r}, the numbers of chosen experts, which have no mean: name "
            raise UsageError(Argument("layer"), words, layer.replace("experts", "router"))
        return matches[0]
    outputs, number = names.matching("layer", "layers.*.output"), as_int(layer)
    n = len(outputs)
    if number is None or not -n <= number < n:
        rule = f"a whole number from {-n} to {n - 1}, for a model of {n} layers, or the name of a value"
        raise UsageError.of("layer", layer, rule)
    return outputs[number]
