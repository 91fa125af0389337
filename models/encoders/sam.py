"""SAM's image encoder (arXiv:2304.02643): attention within windows in most layers, with scores that also depend on
the distances of rows and columns (arXiv:2112.01526). Convolutions then join 16 patches.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, KVCache, Matrix, Rope, Rows, Tensor, Weight
from localllm.kernels.operations import (
    Activation,
    Attention,
    HeadGate,
    Input,
    Linear,
    Outputs,
    RopeAppend,
    SideBySide,
)
from localllm.models.blocks import layer_norm
from localllm.models.encoders.encoder import EncoderStage, FrameRows, Pixels, VisionModel
from localllm.models.encoders.images import bicubic, block_order, patches
from localllm.models.encoders.sounds import convolved
from localllm.models.encoders.views import wave_angles, wave_coefficients
from localllm.models.weights import FloatView, Reshaped, floats

_EPS = 1e-6
#: Key value of rows outside the image, for which each query has a 1.
_UNSEEN = -30_000.0
#: Columns of a query after its waves: a 1, and zeros.
_ROOM = 16


@dataclass(frozen=True, eq=False)
class WithWaves(FloatView):
    """Matrix or bias of queries [n_heads * n, …] with additional values: coefficients of waves of the distances.

    The model adds the product of the query and a vector of the distance to each score, for rows and for columns.
    Over all distances, this product is a sum of waves. A wave of the distance is the product of two values that are
    rotated by position: the query's coefficient, and a constant of the key.
    """

    n_heads: int
    tables: tuple[Weight, ...]  # vectors of the distances of rows and columns, [distances, n] each; empty: no waves
    side: int  # rows and columns; 0 without waves

    @property
    def name(self) -> str:
        return f"{self.whole.name} with {self.side} waves"

    @property
    def dim(self) -> int:
        return self.whole.shape[0] // self.n_heads

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_heads * (self.dim + 4 * self.side + _ROOM), *self.whole.shape[1:]

    def values(self) -> NDArray[np.float32]:
        heads = floats(self.whole).reshape(self.n_heads, self.dim, -1)
        pairs = [self.coefficients(floats(table)) for table in self.tables]
        waves = np.concatenate([np.zeros((0, self.dim)), *(pair[0] for pair in pairs), *(-pair[1] for pair in pairs)])
        waves *= self.dim**0.5  # because the attention multiplies scores by dim ** -0.5
        room = np.zeros((self.n_heads, _ROOM, heads.shape[2]), np.float32)
        room[:, 0] = self.whole.shape[1:] == ()
        return np.concatenate([heads, waves @ heads, room], axis=1)

    def coefficients(self, table: Pixels) -> tuple[Pixels, Pixels]:
        """Return the coefficients of cosines and sines, [side, n] each, from a table for this or another side."""
        n = 2 * self.side - 1
        places = ((np.arange(n) + 0.5) * len(table) / n - 0.5).clip(0, len(table) - 1)
        vectors = np.stack([np.interp(places, np.arange(len(table)), column) for column in table.T], axis=1)
        return wave_coefficients(vectors)


@dataclass(frozen=True, eq=False)
class WithConstants(FloatView):
    """Matrix or bias of keys [n_heads * n, …], with the constants for `WithWaves`.

    Columns of flags follow the columns of a matrix. The last flag marks rows that no query sees.
    """

    n_heads: int
    side: int
    n_flags: int

    @property
    def name(self) -> str:
        return f"{self.whole.name} with {self.side} constants"

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.whole.shape[0] + self.n_heads * (4 * self.side + _ROOM)
        return n, *(columns + self.n_flags for columns in self.whole.shape[1:])

    def values(self) -> NDArray[np.float32]:
        heads = floats(self.whole).reshape(self.n_heads, self.whole.shape[0] // self.n_heads, -1)
        dim, n, is_bias = heads.shape[1], 2 * self.side, len(self.shape) == 1
        longer = np.zeros(
            (self.n_heads, dim + 2 * n + _ROOM, heads.shape[2] + self.n_flags * (not is_bias)), np.float32
        )
        longer[:, :dim, : heads.shape[2]] = heads
        if is_bias:
            longer[:, dim : dim + n] = 1
        elif self.n_flags:
            longer[:, dim + 2 * n, -1] = _UNSEEN
        return longer


class SamVision(VisionModel):
    """SAM as the first stage. The grid of patches is padded to complete windows."""

    has_size = False

    def read(self) -> None:
        number, weights = self.number, self.weights
        self.sam_layers, self.sam_heads = number("sam.block_count"), number("sam.head_count")
        self.sam_width, self.sam_window = number("sam.embedding_length"), number("window_size")
        shape = weights.shape("v.sam.patch_embd.weight")
        if len(shape) != 4 or not 1 <= shape[-1] <= 256 or self.sam_width % self.sam_heads or self.sam_width % 16:
            raise ModelError("the sizes of SAM's encoder contradict each other: the file is broken")
        self.patch_size = shape[-1]
        self.side = weights.n_rows("v.sam.pos_embd.weight")
        self.meta.skip("vision.image_size")

    def record_sam(self, sides: list[int]) -> None:
        """Record a graph for each number of rows and columns of patches."""
        positions = self.table("v.sam.pos_embd.weight", self.side, self.side, self.sam_width)
        self.sam_positions = positions.reshape(-1, self.sam_width)
        self.sides, self.first = sides, []
        for side in sides:
            self.graph = Graph(rounds_floats=True)
            self._record_sam(side)
            self.first.append(self.graph)
        self._convolutions = [
            self.weights.require(f"v.sam.{name}.weight", n_out, n_in, 3, 3)
            for name, n_in, n_out in zip(("neck.2", "net_2", "net_3"), self.channels, self.channels[1:], strict=False)
        ]
        self._norm = [self.weights.require(f"v.sam.neck.3.{name}", self.channels[1]) for name in ("weight", "bias")]

    @cached_property
    def channels(self) -> list[int]:
        """Number of channels of the convolutions' inputs and outputs."""
        n = (self.weights.shape("v.sam.neck.0.weight") or (0,))[0]
        return [n, n, *((self.weights.shape(f"v.sam.net_{i}.weight") or (0,))[0] for i in (2, 3))]

    def _record_sam(self, side: int) -> None:
        weights, d, n = self.weights, self.sam_width, 3 * self.patch_size**2
        self.n_inputs = n + d + 2 * _ROOM

        def given(first: int, width: int) -> Tensor:
            return self.graph.add(Input(Tensor(Rows.TOKENS, width), first, self.n_inputs))

        patch = Reshaped(weights.require("v.sam.patch_embd.weight", d, 3, self.patch_size, self.patch_size), (d, n))
        matrix = Matrix(patch, weights.find("v.sam.patch_embd.bias", d))
        x = self.graph.add(Linear(given(0, n), matrix, residual=given(n, d)))
        flags, is_there = given(n + d, _ROOM), given(n + d + _ROOM, 1)
        caches: dict[int, KVCache] = {}
        for i in range(self.sam_layers):
            self.graph.layer = i
            x = self._sam_layer(i, x, side, flags, is_there, caches)
        self.graph.layer = "output"
        x = self.graph.add(Outputs(x))
        first = Reshaped(weights.require("v.sam.neck.0.weight", self.channels[0], d, 1, 1), (self.channels[0], d))
        self.vector_norm(self.graph.add(Linear(x, Matrix(first))), "v.sam.neck.1", _EPS)

    def _sam_layer(
        self, i: int, x: Tensor, side: int, flags: Tensor, is_there: Tensor, caches: dict[int, KVCache]
    ) -> Tensor:
        at = self.at(self.weights.under(f"v.sam.blk.{i}."), _EPS)
        d, n_heads, w = x.width, self.sam_heads, at.weights
        n_rows, dim = w.n_rows("attn.pos_h.weight"), d // n_heads
        height, width = (w.require(f"attn.pos_{axis}.weight", n_rows, dim) for axis in "hw")
        is_windowed = n_rows == 2 * self.sam_window - 1
        n = self.sam_window if is_windowed else side
        y = layer_norm(at, "pre_ln", x)
        if is_windowed:  # rows outside the image are zeros, and seen
            y = at.add(HeadGate(y, is_there, "sigmoid"))
        query, key, value = w.split("attn.qkv", d, {"q": d, "k": d, "v": d})
        if query.bias is None or key.bias is None:
            raise ModelError(f"tensor v.sam.blk.{i}.attn.qkv.bias is missing: is the file complete?")
        z, n_flags = (y, 0) if is_windowed else (at.add(SideBySide((y, flags))), _ROOM)
        query = Matrix(*(WithWaves(part, n_heads, (height, width), n) for part in (query.weight, query.bias)))
        key = Matrix(*(WithConstants(part, n_heads, n, n_flags) for part in (key.weight, key.bias)))
        if n not in caches:
            caches[n] = self.graph.kv_cache(n_heads, dim + 4 * n + _ROOM, dim)
        rope = Rope(np.tile(wave_angles(n), 2), False, first=dim, axes=(1,) * n + (2,) * n)
        q, k, v = at.add(Linear(y, query)), at.add(Linear(z, key)), at.add(Linear(y, value))
        q = at.add(RopeAppend(q, k, v, caches[n], rope, None, None))
        y = at.add(Attention(q, caches[n], dim**-0.5, causal=False, has_spans=is_windowed))
        x = at.linear(y, "attn.out", d, residual=x)
        y = at.linear(layer_norm(at, "post_ln", x), "mlp.lin1", w.n_rows("mlp.lin1.weight"))
        return at.linear(at.add(Activation(y, "gelu_erf")), "mlp.lin2", d, residual=x)

    @property
    def n_alternatives(self) -> int:
        return len(self.first)

    @property
    def n_joined(self) -> int:
        return 1

    @property
    def stages(self) -> list[EncoderStage]:
        assert self.behind is not None
        return [*(EncoderStage(graph, 1) for graph in self.first), self.behind]

    def rows(self, frame: NDArray[np.uint8]) -> FrameRows:
        """Return the patches by windows. Rows outside the image complete the windows."""
        n, d, side, size = 3 * self.patch_size**2, self.sam_width, frame.shape[0] // self.patch_size, self.sam_window
        total = -(-side // size) * size
        order = block_order(total, total, size)
        row, column = order // total, order % total
        is_there = (row < side) & (column < side)
        source = (row * side + column)[is_there]
        inputs = np.zeros((len(order), self.n_inputs), np.float32)
        inputs[is_there, :n] = patches(self.normalised(frame), self.patch_size)[source]
        inputs[is_there, n : n + d] = bicubic(self.sam_positions, side, side, has_antialiasing=True)[source]
        inputs[~is_there, n + d + _ROOM - 1] = 1
        inputs[:, n + d + _ROOM] = np.where(is_there, 80, -80)
        starts = np.arange(len(order)) // size**2 * size**2
        spans = np.stack([starts, starts + size**2]).astype(np.int32)
        outputs = np.empty(side**2, np.int32)
        outputs[source] = np.flatnonzero(is_there)
        axes = np.stack([order * 0, row, column]).astype(np.int32)
        return FrameRows(inputs, axes, outputs, spans, self.sides.index(side))

    def joined_patches(self, rows: Pixels) -> Generator[None, None, Pixels]:
        """Return the features of the joined patches, [side / 4, side / 4, channels], from the patches' features."""
        side = round(len(rows) ** 0.5)
        x, (scale, bias) = rows.reshape(side, side, -1), map(floats, self._norm)

        def normed(x: Pixels) -> Pixels:
            x = x - x.mean(-1, keepdims=True)
            y: Pixels = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(_EPS)) * scale + bias
            return y

        for i, kernel in enumerate(self._convolutions):
            matrix = floats(kernel).reshape(kernel.shape[0], -1).T
            x = yield from convolved(x, matrix, normed if i == 0 else _same, stride=1 if i == 0 else 2)
        return x


def _same(x: Any) -> Any:
    return x
