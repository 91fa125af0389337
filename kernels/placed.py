"""Weights, caches and what loads them, where several backends share a model: each with the backend that holds it.

**Pages.**  The cache has a part on each backend, which holds its layers.  A page has as many tokens as the least
common multiple of the backends' own pages, and names a run of neighbours in each part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from localllm.errors import KernelError
from localllm.kernels.ops import Experts, KVCache, Linear, Loader, Packed, Weight, Widening


@dataclass(frozen=True)
class Placed:
    """A vector or table of so many values a row, as the backend of that number holds it."""

    backend: int
    held: Any
    width: int


_Held = TypeVar("_Held", bound=Packed)


@dataclass(frozen=True)
class _PlacedMatrices(Generic[_Held]):
    """What the backend of that number packed."""

    backend: int
    held: _Held

    @property
    def n_in(self) -> int:
        return self.held.n_in

    @property
    def n_out(self) -> int:
        return self.held.n_out

    @property
    def format(self) -> str:
        return self.held.format

    @property
    def n_bytes(self) -> int:
        return self.held.n_bytes


class PlacedLinear(_PlacedMatrices[Linear]):
    """A matrix as the backend of that number holds it."""


class PlacedExperts(_PlacedMatrices[Experts]):
    """Matrices of experts as the backend of that number holds them."""

    @property
    def n_experts(self) -> int:
        return self.held.n_experts


@dataclass(frozen=True)
class PlacedLoader(Loader):
    """Loads into the backend of that number, and writes it on what it loads."""

    backend: int
    loader: Loader

    def load_linear(
        self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None
    ) -> PlacedLinear:
        return PlacedLinear(self.backend, self.loader.load_linear(weight, bias, widening=widening))

    def load_experts(self, weight: Weight, *, widening: Widening | None = None) -> PlacedExperts:
        return PlacedExperts(self.backend, self.loader.load_experts(weight, widening=widening))

    def packed_bytes(self, weight: Weight) -> int:
        return self.loader.packed_bytes(weight)

    def load_vector(self, weight: Weight) -> Placed:
        return Placed(self.backend, self.loader.load_vector(weight), weight.shape[0])

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> Placed:
        if packed is not None and not (isinstance(packed, PlacedLinear) and packed.backend == self.backend):
            raise KernelError("an embedding cannot be taken from a matrix that another backend holds")
        table = self.loader.load_embedding(weight, None if packed is None else packed.held)
        return Placed(self.backend, table, weight.shape[1])


@dataclass(frozen=True)
class SplitCache:
    """Keys and values of each backend's layers, in a cache of its own."""

    parts: tuple[KVCache, ...]
    page_size: int
    n_pages: int

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    def copy_page(self, source: int, target: int) -> None:
        for part in self.parts:
            n = self.page_size // part.page_size
            for i in range(n):
                part.copy_page(n * source + i, n * target + i)
