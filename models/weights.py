"""The tensors of a file, by name, checked against the shapes that the hyper-parameters call for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.ops import Linear, Ops, Weight
from localllm.quant.formats import dequantize

#: Called with the bytes packed so far and the bytes of all tensors.
Progress = Callable[[int, int], None]

#: What old converters wrote beside the weights: rotary frequencies, which the hyper-parameters give as well.
_NEEDLESS = re.compile(r"(blk\.\d+\.)?(attn_rot_embd|rope\.freqs|attn\.rotary_emb\.inv_freq)(\.weight)?")


class Weights:
    """Loads a model's weights into a backend, and remembers which ones it has loaded."""

    def __init__(self, tensors: Mapping[str, Weight], ops: Ops, progress: Progress | None = None) -> None:
        self._tensors = tensors
        self._ops = ops
        self._progress = progress
        self._n_bytes = sum(t.data.nbytes for name, t in tensors.items() if not _NEEDLESS.fullmatch(name))
        self._loaded: dict[str, int] = {}

    def layer(self, i: int) -> LayerWeights:
        """The weights of layer ``i`` (names that begin with ``blk.{i}.``)."""
        return LayerWeights(self, f"blk.{i}.")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

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

    def values(self, name: str, n: int) -> NDArray[np.float64]:
        """What the small tensor ``name`` [n] holds, for reading here and now."""
        weight = self.require(name, n)
        self._report(weight)
        return dequantize(weight.data, weight.type).reshape(n).astype(np.float64)

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

    def linear(self, name: str, n_in: int, n_out: int, *, bias: bool = False, tied_to: str | None = None) -> Linear:
        """The matrix ``{name}.weight`` [n_out, n_in], with ``{name}.bias`` [n_out] if there is one.

        With ``bias``, there must be one.  With ``tied_to``, a file without the matrix shares that one.
        """
        weight = self.find(f"{name}.weight", n_out, n_in)
        if weight is None:
            weight = self.require(f"{tied_to or name}.weight", n_out, n_in)
        added = (self.require if bias else self.find)(f"{name}.bias", n_out)
        linear = self._ops.load_linear(weight, added)
        weight.drop_pages()
        self._report(weight, added)
        return linear

    def refuse_leftovers(self) -> None:
        """To be called at the end: a tensor that nobody asked for means that the model computes something else.

        Raises:
            ModelError: there is one.
        """
        left = [name for name in self._tensors if name not in self._loaded and not _NEEDLESS.fullmatch(name)]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"the file has a tensor {left[0]}{others} that a model of its architecture does not use, "
                "so its output would be wrong: localllm does not support this variant"
            )

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

    def linear(self, name: str, n_in: int, n_out: int, *, bias: bool = False) -> Linear:
        return self._weights.linear(self._prefix + name, n_in, n_out, bias=bias)
