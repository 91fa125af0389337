"""The tensors of a file, by name, checked against the shapes that the hyper-parameters call for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.ops import Linear, Ops, Weight


@dataclass(frozen=True)
class Weights:
    """Loads a model's weights into a backend."""

    tensors: Mapping[str, Weight]
    ops: Ops
    prefix: str = ""

    def layer(self, i: int) -> Weights:
        """The weights of layer ``i`` (names that begin with ``blk.{i}.``)."""
        return replace(self, prefix=f"blk.{i}.")

    def find(self, name: str, *shape: int) -> Weight | None:
        """The tensor ``{prefix}{name}``, or None if the file has none.

        Raises:
            ModelError: its shape is not ``shape``.
        """
        tensor = self.tensors.get(self.prefix + name)
        if tensor is not None and tensor.shape != shape:
            raise ModelError(
                f"tensor {tensor.name} has the shape {tensor.shape}, but the hyper-parameters call for {shape}: "
                "the file's metadata and tensors disagree"
            )
        return tensor

    def require(self, name: str, *shape: int) -> Weight:
        tensor = self.find(name, *shape)
        if tensor is None:
            raise ModelError(f"the file has no tensor {self.prefix}{name}: is it complete?")
        return tensor

    def vector(self, name: str, n: int) -> Any:
        """The vector ``{name}.weight`` [n]."""
        return self.ops.load_vector(self.require(f"{name}.weight", n))

    def embedding(self, name: str, n_vocab: int, n_embd: int) -> Any:
        """The table ``{name}.weight`` [n_vocab, n_embd]."""
        return self.ops.load_embedding(self.require(f"{name}.weight", n_vocab, n_embd))

    def linear(self, name: str, n_in: int, n_out: int, *, tied_to: str | None = None) -> Linear:
        """The matrix ``{name}.weight`` [n_out, n_in], with ``{name}.bias`` if there is one.

        With ``tied_to``, a file without the matrix shares that one.
        """
        weight = self.find(f"{name}.weight", n_out, n_in)
        if weight is None and tied_to is not None:
            weight = self.require(f"{tied_to}.weight", n_out, n_in)
        return self.ops.load_linear(
            weight or self.require(f"{name}.weight", n_out, n_in), self.find(f"{name}.bias", n_out)
        )
