"""The tensors of a file, found by name and checked against the shapes that the hyper-parameters call for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Matrix, Weight
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType

#: What old converters wrote beside the weights: rotary frequencies, which the hyper-parameters give as well.
_NEEDLESS = re.compile(r"(blk\.\d+\.)?(attn_rot_embd|rope\.freqs|attn\.rotary_emb\.inv_freq)(\.weight)?")


class ModelFile(Protocol):
    """What a model is read from (`localllm.gguf.GGUFFile` is one)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Weight]:
        """By name.

        Raises:
            ClosedError: the file was closed.
        """
        ...


@dataclass(frozen=True, eq=False)
class FileWeight:
    """A tensor of a file that is open while its data is read: of a closed one, nothing stays mapped."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    _file: ModelFile

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._file.tensors[self.name].data

    def drop_pages(self) -> None:
        self._file.tensors[self.name].drop_pages()


class Weights:
    """Finds a model's tensors, and remembers which ones it has found.  None of them is read, but by `values`."""

    def __init__(self, file: ModelFile, prefix: str = "", found: dict[str, FileWeight] | None = None) -> None:
        """``prefix`` stands before every name; ``found`` is what was found so far."""
        self._file, self._prefix = file, prefix
        self._found = dict[str, FileWeight]() if found is None else found

    def layer(self, i: int) -> Weights:
        """The weights of layer ``i``, whose names begin with ``blk.{i}.``."""
        return Weights(self._file, f"{self._prefix}blk.{i}.", self._found)

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._file.tensors

    def find(self, name: str, *shape: int) -> Weight | None:
        """The tensor ``name``, or None if the file has none.

        Raises:
            ModelError: its shape is not ``shape``.
        """
        name = self._prefix + name
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape != shape:
            raise ModelError(
                f"tensor {name} has the shape {list(tensor.shape)}, but the hyper-parameters call for "
                f"{list(shape)}: the file's metadata and tensors disagree"
            )
        return self._found.setdefault(name, FileWeight(name, tensor.type, tensor.shape, self._file))

    def require(self, name: str, *shape: int) -> Weight:
        """The tensor ``name``.

        Raises:
            ModelError: the file has none, or its shape is not ``shape``.
        """
        tensor = self.find(name, *shape)
        if tensor is None:
            raise ModelError(f"the file has no tensor {self._prefix}{name}: is it complete?")
        return tensor

    def vector(self, name: str, n: int) -> Weight:
        """The vector ``{name}.weight`` [n]."""
        return self.require(f"{name}.weight", n)

    def matrix(self, name: str, n_in: int, n_out: int, *, bias: bool = False, tied_to: str | None = None) -> Matrix:
        """The matrix ``{name}.weight`` [n_out, n_in], with ``{name}.bias`` [n_out] if there is one.

        With ``bias``, there must be one.  With ``tied_to``, a file without the matrix shares that one.
        """
        weight = self.find(f"{name}.weight", n_out, n_in)
        if weight is None:
            weight = self.require(f"{tied_to or name}.weight", n_out, n_in)
        return Matrix(weight, (self.require if bias else self.find)(f"{name}.bias", n_out))

    def experts(self, name: str, n_experts: int, n_in: int, n_out: int) -> Weight:
        """The matrices ``{name}.weight`` [n_experts, n_out, n_in]."""
        return self.require(f"{name}.weight", n_experts, n_out, n_in)

    def values(self, name: str, n: int) -> NDArray[np.float64]:
        """What the small tensor ``name`` [n] holds, read here and now."""
        weight = self.require(name, n)
        return dequantize(weight.data, weight.type).reshape(n).astype(np.float64)

    def check_all_used(self) -> None:
        """To be called at the end: a tensor that nobody asked for means that the model computes something else.

        Raises:
            ModelError: there is one.
        """
        left = [name for name in self._file.tensors if name not in self._found and not _NEEDLESS.fullmatch(name)]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"the file has a tensor {quoted(left[0])}{others} that a model of its architecture does not use, "
                "so its output would be wrong: localllm does not support this variant"
            )
