"""Conformers (arXiv:2005.08100): each layer is half an MLP, attention, a convolution along the rows, and half an MLP.

Scores of attention depend on the distance of two rows: a model adds the product of the query and a vector of the
distance (arXiv:1803.02155). Over all distances, this product is a sum of waves. A wave of the distance is the product
of two values that are rotated by position: the query's coefficient, and a constant of the key. So attention with
longer heads computes the same scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels import operations as ops
from localllm.kernels.graph import KVCache, Matrix, Rope, Tensor, Weight, WeightView
from localllm.models.blocks import Layer, add
from localllm.models.encoders.encoder import EncoderCheckpoint
from localllm.models.encoders.views import RowsScaled, wave_angles, wave_coefficients
from localllm.models.encoders.whisper import SoundModel
from localllm.models.hf_convert import Array
from localllm.models.weights import FloatView, Weights, floats

#: Values before the values of a key: a 1, then zeros. They become the constants of the waves.
_ROOM = 32
#: Epsilon of batch norms.
_BATCH_EPS = 1e-5


def rounded_up(n: int) -> int:
    """Return the number of values of n waves: a multiple of 32."""
    return -(-2 * n // 32) * 32


@dataclass(frozen=True, eq=False)
class HeadsRepeated(WeightView):
    """A matrix of queries [n_heads * dim, n_in] with the rows of each head repeated once."""

    n_heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return 2 * self.whole.shape[0], self.whole.shape[1]

    @property
    def data(self) -> NDArray[np.uint8]:
        heads = self.whole.data.reshape(self.n_heads, -1, self.whole.data.shape[-1])
        return np.concatenate([heads, heads], axis=1).reshape(self.shape[0], -1)


@dataclass(frozen=True, eq=False)
class QueryBias(FloatView):
    """The bias of `HeadsRepeated`: each head's bias for distances, then its bias for contents (arXiv:1901.02860).

    ``whole``: the matrix.
    """

    n_heads: int
    bias: Weight | None  # bias of the matrix
    distances: Weight | None  # [n_heads, dim]
    contents: Weight | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.whole.shape[0],)

    def values(self) -> NDArray[np.float32]:
        heads = np.zeros((self.n_heads, 2, self.whole.shape[0] // self.n_heads), np.float32)
        if self.bias is not None:
            heads += floats(self.bias).reshape(self.n_heads, 1, -1)
        for i, added in enumerate((self.distances, self.contents)):
            if added is not None:
                heads[:, i] += floats(added)
        return heads


@dataclass(frozen=True, eq=False)
class HeadsAfterZeros(WeightView):
    """A matrix of keys [n_heads * dim, n_in] with `_ROOM` rows of zeros before the rows of each head."""

    n_heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[0] + self.n_heads * _ROOM, self.whole.shape[1]

    @property
    def data(self) -> NDArray[np.uint8]:
        heads = self.whole.data.reshape(self.n_heads, -1, self.whole.data.shape[-1])
        return np.pad(heads, ((0, 0), (_ROOM, 0), (0, 0))).reshape(self.shape[0], -1)


@dataclass(frozen=True, eq=False)
class KeyBias(FloatView):
    """The bias of `HeadsAfterZeros`: a 1 at the start of each head, and the bias of keys. ``whole``: the matrix."""

    n_heads: int
    bias: Weight | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.whole.shape[0] + self.n_heads * _ROOM,)

    def values(self) -> NDArray[np.float32]:
        heads = np.zeros((self.n_heads, self.shape[0] // self.n_heads), np.float32)
        heads[:, 0] = 1
        if self.bias is not None:
            heads[:, _ROOM:] = floats(self.bias).reshape(self.n_heads, -1)
        return heads


@dataclass(frozen=True, eq=False)
class Constants(FloatView):
    """Matrices [n_heads, n, _ROOM] from a 1 to the constants of n / 2 waves: ones, then zeros."""

    n_heads: int
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_heads, self.n, _ROOM

    def values(self) -> NDArray[np.float32]:
        matrices = np.zeros(self.shape, np.float32)
        matrices[:, : self.n // 2, 0] = 1
        return matrices


@dataclass(frozen=True, eq=False)
class WavesOfTable(FloatView):
    """Matrices [n_heads, n, dim] from a query to coefficients of waves, for a table of vectors of distances.

    Rows of the table are distances from the query's row to the key's; the middle row is distance 0.
    """

    n_heads: int
    side: int  # distances are less than this number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_heads, rounded_up(self.side), self.whole.shape[1]

    def values(self) -> NDArray[np.float32]:
        middle, room = self.whole.shape[0] // 2, self.shape[1] // 2 - self.side
        pair = wave_coefficients(floats(self.whole)[middle - self.side + 1 : middle + self.side])
        cosines, sines = (np.pad(part, ((0, room), (0, 0))) for part in pair)
        return np.broadcast_to(np.concatenate([cosines, -sines]), self.shape)

    @property
    def rope(self) -> Rope:
        """The rotation of the waves by axis 1 of the rows."""
        angles = np.pad(wave_angles(self.side), (0, self.shape[1] // 2 - self.side))
        return Rope(angles, False, axes=(1,) * len(angles))


@dataclass(frozen=True, eq=False)
class WavesOfMatrix(FloatView):
    """Matrices [n_heads, d, dim] from a query to coefficients of d / 2 waves, for a matrix of positions [d, d].

    A vector of a distance is the product of the matrix and values of the distance: at 2 i the sine and at 2 i + 1 the
    cosine of wave i, with the angles of Transformer's positions (arXiv:1706.03762).
    """

    n_heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, d = self.whole.shape
        return self.n_heads, d, rows // self.n_heads

    def values(self) -> NDArray[np.float32]:
        heads = floats(self.whole).reshape(self.n_heads, -1, self.whole.shape[1]).swapaxes(1, 2)
        return np.concatenate([heads[:, 1::2], -heads[:, ::2]], axis=1)

    @property
    def rope(self) -> Rope:
        """The rotation of the waves by position."""
        d = self.whole.shape[1]
        return Rope((1e4 ** -(np.arange(0, d, 2) / d)).astype(np.float32), False)


@dataclass(frozen=True, eq=False)
class BatchScale(FloatView):
    """The factors of a batch norm: its weight, divided by deviations."""

    variance: Weight

    def values(self) -> NDArray[np.float32]:
        scale: NDArray[np.float32] = floats(self.whole) / np.sqrt(floats(self.variance) + _BATCH_EPS)
        return scale


@dataclass(frozen=True, eq=False)
class BatchBias(FloatView):
    """The bias of a convolution and the batch norm after it. ``whole``: the norm's bias."""

    scale: Weight
    mean: Weight | None
    bias: Weight | None  # bias of the convolution

    def values(self) -> NDArray[np.float32]:
        shift = np.zeros(self.whole.shape, np.float32)
        if self.mean is not None:
            shift -= floats(self.mean)
        if self.bias is not None:
            shift += floats(self.bias)
        return floats(self.whole) + shift * floats(self.scale)


class Conformer(SoundModel):
    #: Name of the norm of a layer's output.
    last_norm = "ln2"

    def layer(self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None) -> Tensor:
        x = self.half_mlp(at, x, "")
        x = self.attend(at, x, cache, rope)
        x = self.convolution(at, x)
        return self.norm(at, self.last_norm, self.half_mlp(at, x, "_1"))

    def masked(self, at: Layer, x: Tensor) -> Tensor:
        """Return x with zeros in rows of padding: queries and the input of a convolution. By default, unchanged."""
        return x

    def half_mlp(self, at: Layer, x: Tensor, which: str) -> Tensor:
        y = at.linear(self.norm(at, f"ffn_norm{which}", x), f"ffn_up{which}", self.n_ff)
        return add(at, at.linear(at.add(ops.Activation(y, "silu")), f"ffn_down{which}", self.n_embd), x, 0.5)

    # -- Convolution -----------------------------------------------------------------------------------------------

    def gated_halves(self, at: Layer, x: Tensor) -> Tensor:
        """Return the first half of each row, times sigmoids of the second half."""
        n = x.width // 2
        up, gate = (at.add(ops.Columns(x, columns)) for columns in (range(n), range(n, x.width)))
        return at.add(ops.Gated(gate, up, "sigmoid"))

    def convolution(self, at: Layer, x: Tensor) -> Tensor:
        shape = at.weights.shape("conv_dw.weight")[-2:]
        if len(shape) != 2 or not shape[1]:
            raise ModelError("the convolutions of the audio encoder are missing: is the file complete?")
        n, size = shape
        y = self.masked(at, self.gated_halves(at, at.linear(self.norm(at, "norm_conv", x), "conv_pw1", 2 * n)))
        state = at.graph.state("conv", size - 1, n)
        kernel, bias = self.kernel(at.weights, n, size)
        y = at.add(ops.CausalConv(y, kernel, state, bias, silu=True, ahead=(size - 1) // 2))
        return at.linear(y, "conv_pw2", self.n_embd, residual=x)

    def kernel(self, w: Weights, n: int, size: int) -> tuple[Weight, Weight]:
        """Return the kernel and the bias of a convolution, with the batch norm after it."""
        # llama.cpp's converter, with its package gguf, writes the other name for Granite Speech.
        name = "conv_norm_var" if "conv_norm_var.weight" in w else "conv_norm"
        scale, bias = w.require(f"{name}.weight", n), w.require(f"{name}.bias", n)
        return RowsScaled(w.require("conv_dw.weight", n, size), scale), bias

    # -- Attention -------------------------------------------------------------------------------------------------

    def waves(self, w: Weights) -> WavesOfTable | WavesOfMatrix:
        """Return the matrices of a layer from queries to coefficients of waves. ``w`` may be of any layer."""
        raise NotImplementedError

    def check_heads(self) -> None:
        """Check the number of layers and the sizes of heads."""
        if not self.n_layers or self.head_dim % 32:
            raise ModelError("the audio encoder's sizes are missing or not supported: the file is broken")

    def cache(self) -> KVCache:
        n = self.waves(self.weights.layer(0, self.stem)).shape[1]
        return self.graph.kv_cache(self.n_heads, n + self.head_dim, self.head_dim)

    def attend(self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None) -> Tensor:
        y, w, d, n_heads = self.norm(at, "ln1", x), at.weights, self.n_embd, self.n_heads
        query, key, value = (w.matrix(f"attn_{name}", d, d) for name in "qkv")
        biases = query.bias, *(w.find(f"pos_bias_{name}", n_heads, self.head_dim) for name in "vu")
        query_bias = QueryBias(query.weight, n_heads, *biases) if any(biases) else None
        key_bias = KeyBias(key.weight, n_heads, key.bias)
        q = self.masked(at, at.add(ops.Linear(y, Matrix(HeadsRepeated(query.weight, n_heads), query_bias))))
        k = at.add(ops.Linear(y, Matrix(HeadsAfterZeros(key.weight, n_heads), key_bias)))
        waves = self.waves(w)
        q = at.add(ops.HeadLinear(q, waves))
        k = at.add(ops.HeadLinear(k, Constants(key.weight, n_heads, waves.shape[1])))
        q = at.add(ops.RopeAppend(q, k, at.add(ops.Linear(y, value)), cache, waves.rope))
        is_windowed = at.graph.layer in self.windowed
        z = at.add(ops.Attention(q, cache, self.head_dim**-0.5, causal=False, has_spans=is_windowed))
        return at.linear(z, "attn_out", d, residual=x)


def folded_norm(name: str, array: Array, c: EncoderCheckpoint) -> Array:
    """Return a batch norm's weight or bias, with the running mean and variance applied."""
    stem, _, kind = name.rpartition(".")
    weight: Any = array if kind == "weight" else c.read(f"{stem}.weight")
    scale = weight / np.sqrt(c.read(f"{stem}.running_var") + _BATCH_EPS)
    folded: Array = scale if kind == "weight" else array - c.read(f"{stem}.running_mean") * scale
    return folded
