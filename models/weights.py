"""The tensors of a file, by name, checked against the shapes that the hyper-parameters call for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.ops import Linear, Ops, Weight

#: Called with the bytes packed so far and the bytes of all tensors.
Progress = Callable[[int, int], None]


class Weights:
    """Loads a model's weights into a backend, and remembers which ones it has loaded."""

    def __init__(self, tensors: Mapping[str, Weight], ops: Ops, progress: Progress | None = None) -> None:
        self._tensors = tensors
        self._ops = ops
        self._progress = progress
        self._n_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
        self._loaded: dict[str, int] = {}

    def layer(self, i: int) -> LayerWeights:
        """The weights of layer ``i`` (names that begin with ``blk.{i}.``)."""
        return LayerWeights(self, f"blk.{i}.")

    def find(self, name: str, *shape: int) -> Weight | None:
        """The tensor ``name``, or None if the file has none.

        Raises:
            ModelError: its shape is not ``shape``.
        """
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            raise ModelError(
                f"tensor {name} has the shape {list(tensor.shape)}, but the hyper-parameters call for "
                f"{list(shape)}: the file's metadata and tensors disagree"
            )
        return tensor

    def require(self, name: str, *shape: int) -> Weight:
        """The tensor ``name``.

        Raises:
            ModelError: the file has none, or its shape is not ``shape``.
        """
        tensor = self.find(name, *shape)
        if tensor is None:
            raise ModelError(f"the file has no tensor {name}: is it complete?")
        return tensor

    def vector(self, name: str, n: int) -> Any:
        """The vector ``{name}.weight`` [n]."""
        weight = self.require(f"{name}.weight", n)
        vector = self._ops.load_vector(weight)
        self._report(weight)
        return vector

    def embedding(self, name: str, n_vocab: int, n_embd: int) -> Any:
        """The table ``{name}.weight`` [n_vocab, n_embd]."""
        weight = self.require(f"{name}.weight", n_vocab, n_embd)
        table = self._ops.load_embedding(weight)
        self._report(weight)
        return table

    def linear(self, name: str, n_in: int, n_out: int, *, tied_to: str | None = None) -> Linear:
        """The matrix ``{name}.weight`` [n_out, n_in], with ``{name}.bias`` [n_out] if there is one.

        With ``tied_to``, a file without the matrix shares that one.
        """
        weight = self.find(f"{name}.weight", n_out, n_in)
        if weight is None:
            weight = self.require(f"{tied_to or name}.weight", n_out, n_in)
        bias = self.find(f"{name}.bias", n_out)
        linear = self._ops.load_linear(weight, bias)
        self._report(weight, bias)
        return linear

    def _report(self, *weights: Weight | None) -> None:
        self._loaded |= {weight.name: weight.data.nbytes for weight in weights if weight is not None}
        if self._progress is not None:
            self._progress(sum(self._loaded.values()), self._n_bytes)


class LayerWeights:
    """The weights of one layer: `Weights` with a prefix before every name."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def vector(self, name: str, n: int) -> Any:
        return self._weights.vector(self._prefix + name, n)

    def linear(self, name: str, n_in: int, n_out: int) -> Linear:
        return self._weights.linear(self._prefix + name, n_in, n_out)
