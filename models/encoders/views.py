"""Weights of encoders that are computed from a file's weights at each read, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.graph import Weight, WeightView
from localllm.models.weights import FloatView, floats


@dataclass(frozen=True, eq=False)
class SumOf(FloatView):
    """The sum of two weights: the kernels of a convolution over two images, for one image used twice."""

    second: Weight

    def values(self) -> NDArray[np.float32]:
        return floats(self.whole) + floats(self.second)


@dataclass(frozen=True, eq=False)
class RowsScaled(FloatView):
    """A matrix or bias with a factor per row, which scales the output values."""

    factors: Weight

    def values(self) -> NDArray[np.float32]:
        values = floats(self.whole)
        return values * floats(self.factors).reshape(-1, *(1,) * (values.ndim - 1))


@dataclass(frozen=True, eq=False)
class ColumnsByPart(FloatView):
    """A matrix whose columns, which interleave ``n`` parts, are reordered part by part."""

    n: int

    def values(self) -> NDArray[np.float32]:
        values = floats(self.whole)
        return values.reshape(len(values), -1, self.n).swapaxes(1, 2)


@dataclass(frozen=True, eq=False)
class HeadsReordered(WeightView):
    """Rows or values of heads, reordered in the same way within each head.

    Then a rotation of complete heads is equivalent to separate rotations of their parts.
    """

    order: NDArray[np.int64]  # [head_dim]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        data = self.whole.data
        heads = data.reshape(self.shape[0] // len(self.order), len(self.order), -1)
        return heads[:, self.order].reshape(data.shape)


@dataclass(frozen=True, eq=False)
class Transposed(FloatView):
    """A matrix that is stored transposed."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[::-1]

    def values(self) -> NDArray[np.float32]:
        return floats(self.whole).T


@dataclass(frozen=True, eq=False)
class Diagonal(FloatView):
    """A diagonal matrix from a vector times a factor."""

    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape * 2

    def values(self) -> NDArray[np.float32]:
        return np.diag(floats(self.whole) * np.float32(self.factor))


@dataclass(frozen=True, eq=False)
class ProductOf(FloatView):
    """The product of the values of two weights and a factor."""

    second: Weight
    factor: float

    def values(self) -> NDArray[np.float32]:
        return floats(self.whole) * floats(self.second) * np.float32(self.factor)


@dataclass(frozen=True, eq=False)
class WithBias(FloatView):
    """A matrix with 16 additional columns: zeros, then a bias, for inputs that end with a 1."""

    bias: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[0], self.whole.shape[1] + 16

    def values(self) -> NDArray[np.float32]:
        return np.hstack([floats(self.whole), np.pad(floats(self.bias)[:, None], ((0, 0), (15, 0)))])


def wave_angles(side: int) -> NDArray[np.float32]:
    """Return the angles per step of ``side`` waves, whose sums can be any function of distances below ``side``."""
    angles: NDArray[np.float32] = (2 * np.pi / (2 * side - 1) * np.arange(side)).astype(np.float32)
    return angles


def wave_coefficients(vectors: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the coefficients of cosines and sines, [side, n] each, of vectors of the distances, [2 * side - 1, n].

    The first vector belongs to the distance 1 - side.
    """
    side = len(vectors) // 2 + 1
    angles = wave_angles(side)[:, None] * np.arange(1 - side, side)
    share = np.where(np.arange(side) == 0, 1, 2)[:, None] / len(vectors)
    return share * np.cos(angles) @ vectors, share * np.sin(angles) @ vectors
