"""The tensors of a file, by name, checked against the shapes that the hyper-parameters call for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, NotEnoughMemoryError, quoted
from localllm.kernels.ops import Experts, Linear, Loader, Ops, Place, Weight
from localllm.quant.formats import dequantize

#: Called with the bytes packed so far and the bytes of all tensors.
Progress = Callable[[int, int], None]

#: What old converters wrote beside the weights: rotary frequencies, which the hyper-parameters give as well.
_NEEDLESS = re.compile(r"(blk\.\d+\.)?(attn_rot_embd|rope\.freqs|attn\.rotary_emb\.inv_freq)(\.weight)?")


@dataclass(frozen=True, slots=True)
class LoadedWeight:
    """A tensor as a backend holds it.

    Attributes:
        name: in the file.
        place: in the model.
        file_type: its format there, such as "IQ2_XS".
        kernel_type: the format that kernels read, such as "LUT_IQ2_16".
        n_bytes: what it takes in memory.
        planned_bytes: what was counted on; less where the format planned on cannot hold its values.
    """

    name: str
    place: Place
    file_type: str
    kernel_type: str
    n_bytes: int
    planned_bytes: int

    @property
    def unplanned_bytes(self) -> int:
        """What it takes beyond that."""
        return max(0, self.n_bytes - self.planned_bytes)


class Weights:
    """Loads a model's weights into a backend, and remembers which ones it has loaded."""

    def __init__(
        self,
        tensors: Mapping[str, Weight],
        ops: Ops,
        progress: Progress | None = None,
        spare_bytes: int | None = None,
    ) -> None:
        """``spare_bytes``: what weights may take beyond `Loader.packed_bytes`; None for any amount."""
        self._tensors = tensors
        self._ops = ops
        self._progress = progress
        self._spare_bytes = spare_bytes
        self._held: list[LoadedWeight] = []
        self._n_bytes = sum(t.data.nbytes for name, t in tensors.items() if not _NEEDLESS.fullmatch(name))
        self._loaded: dict[str, int] = {}

    @property
    def held(self) -> tuple[LoadedWeight, ...]:
        """What the backend holds so far."""
        return tuple(self._held)

    def layer(self, i: int) -> LayerWeights:
        """The weights of layer ``i`` (names that begin with ``blk.{i}.``)."""
        return LayerWeights(self, i)

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

    def vector(self, name: str, n: int, place: Place) -> Any:
        """The vector ``{name}.weight`` [n]."""
        weight, loader = self.require(f"{name}.weight", n), self._ops.at(place)
        vector = loader.load_vector(weight)
        self._hold(weight, place, "F32", loader.packed_bytes(weight))
        self._report(weight)
        return vector

    def embedding(self, name: str, n_vocab: int, n_embd: int, head: Linear) -> Any:
        """The table ``{name}.weight`` [n_vocab, n_embd]; in a model without output matrix, that of its ``head``.

        Where the head lies on another backend, it is loaded once more.
        """
        weight, loader = self.require(f"{name}.weight", n_vocab, n_embd), self._ops.at("embedding")
        if weight.name in self._loaded and loader is self._ops.at("output"):
            return loader.load_embedding(weight, head)
        table = loader.load_embedding(weight)
        weight.drop_pages()
        self._hold(weight, "embedding", weight.type.name, weight.data.nbytes, weight.data.nbytes)
        self._report(weight)
        return table

    def linear(
        self, name: str, n_in: int, n_out: int, place: Place, *, bias: bool = False, tied_to: str | None = None
    ) -> Linear:
        """The matrix ``{name}.weight`` [n_out, n_in], with ``{name}.bias`` [n_out] if there is one.

        With ``bias``, there must be one.  With ``tied_to``, a file without the matrix shares that one.

        Raises:
            NotEnoughMemoryError: its values do not fit into the format that was planned on, nor the one that can
                hold them into the memory that is left.
        """
        weight = self.find(f"{name}.weight", n_out, n_in)
        if weight is None:
            weight = self.require(f"{tied_to or name}.weight", n_out, n_in)
        added = (self.require if bias else self.find)(f"{name}.bias", n_out)
        loader = self._ops.at(place)
        linear = loader.load_linear(weight, added, widening=partial(self._widen, loader))
        weight.drop_pages()
        self._hold(weight, place, linear.format, linear.n_bytes)
        if added is not None:
            self._hold(added, place, "F32", loader.packed_bytes(added))
        self._report(weight, added)
        return linear

    def experts(self, name: str, n_experts: int, n_in: int, n_out: int, place: Place) -> Experts:
        """The matrices ``{name}.weight`` [n_experts, n_out, n_in].

        Raises:
            NotEnoughMemoryError: as `linear`.
        """
        weight, loader = self.require(f"{name}.weight", n_experts, n_out, n_in), self._ops.at(place)
        experts = loader.load_experts(weight, widening=partial(self._widen, loader))
        weight.drop_pages()
        self._hold(weight, place, experts.format, experts.n_bytes)
        self._report(weight)
        return experts

    def refuse_leftovers(self) -> None:
        """To be called at the end: a tensor that nobody asked for means that the model computes something else.

        Raises:
            ModelError: there is one.
        """
        left = [name for name in self._tensors if name not in self._loaded and not _NEEDLESS.fullmatch(name)]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"the file has a tensor {quoted(left[0])}{others} that a model of its architecture does not use, "
                "so its output would be wrong: localllm does not support this variant"
            )

    def _hold(
        self, weight: Weight, place: Place, kernel_type: str, n_bytes: int, planned_bytes: int | None = None
    ) -> None:
        planned = self._ops.at(place).packed_bytes(weight) if planned_bytes is None else planned_bytes
        self._held.append(LoadedWeight(weight.name, place, weight.type.name, kernel_type, n_bytes, planned))

    def _widen(self, loader: Loader, weight: Weight, kernel_type: str, n_bytes: int) -> None:
        """Takes what a weight needs beyond the plan from the bytes to spare."""
        if self._spare_bytes is None:
            return
        planned = loader.packed_bytes(weight)
        if n_bytes - planned > self._spare_bytes:
            raise NotEnoughMemoryError(
                f"tensor {weight.name} has scales beyond the range of float16, in which {weight.type.name} is read: "
                f"it would have to be kept in {kernel_type} and take {n_bytes / 1e9:.2f} GB instead of "
                f"{planned / 1e9:.2f} GB, but {max(0, self._spare_bytes) / 1e9:.2f} GB is to spare: close other "
                "programs, choose a smaller context, or another quantisation of the model"
            )
        self._spare_bytes -= n_bytes - planned

    def _report(self, *weights: Weight | None) -> None:
        self._loaded |= {weight.name: weight.data.nbytes for weight in weights if weight is not None}
        if self._progress is not None:
            self._progress(sum(self._loaded.values()), self._n_bytes)


class LayerWeights:
    """The weights of one layer: `Weights` with a prefix before every name."""

    def __init__(self, weights: Weights, layer: int) -> None:
        self._weights = weights
        self._layer = layer
        self._prefix = f"blk.{layer}."

    def vector(self, name: str, n: int) -> Any:
        return self._weights.vector(self._prefix + name, n, self._layer)

    def linear(self, name: str, n_in: int, n_out: int, *, bias: bool = False) -> Linear:
        return self._weights.linear(self._prefix + name, n_in, n_out, self._layer, bias=bias)

    def experts(self, name: str, n_experts: int, n_in: int, n_out: int) -> Experts:
        return self._weights.experts(self._prefix + name, n_experts, n_in, n_out, self._layer)
