"""MiniCPM-V 4.6: an image and, if the image is large, a grid of slices. After some layers, groups of four patches are
merged into one, after attention within the group. After the last layer, four of these become a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Rows, Tensor
from localllm.kernels.operations import Activation, Add, Input, Outputs
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    EncoderStage,
    FrameRows,
    Pixels,
    Prepared,
    VisionModel,
    require_same,
)
from localllm.models.encoders.images import block_order, cut, resized
from localllm.models.encoders.siglip import ENCODER_NAMES
from localllm.models.hf_convert import Array

HF_NAMES = ENCODER_NAMES | {
    "vit_merger.layer_norm1": "v.vit_merger.ln1",
    "vit_merger.self_attn.q_proj": "v.vit_merger.attn_q",
    "vit_merger.self_attn.k_proj": "v.vit_merger.attn_k",
    "vit_merger.self_attn.v_proj": "v.vit_merger.attn_v",
    "vit_merger.self_attn.out_proj": "v.vit_merger.attn_out",
    "vit_merger.pre_norm": "v.vit_merger.ds_ln",
    "vit_merger.linear_1": "v.vit_merger.ds_ffn_up",
    "vit_merger.linear_2": "v.vit_merger.ds_ffn_down",
    "merger.mlp.0.pre_norm": "mm.input_norm",
    "merger.mlp.0.linear_1": "mm.up",
    "merger.mlp.0.linear_2": "mm.down",
}

HF_MEANT = {
    "drop_vision_last_layer": (False,),
    "merge_kernel_size": ([2, 2],),
    "merger_times": (1,),
    "use_image_id": (True,),
    "insert_layer_id": (),  # of the encoder; the model's setting replaces it
    "image_size": (),
}

#: Default of the maximum number of slices of an image, without the complete image.
MAX_SLICES = 9


def _merge(c: EncoderCheckpoint) -> int:
    """Return the side in patches of the square that becomes one row."""
    return 2 if c.values.get("downsample_mode") == "4x" else 4


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    slices = c.processor.get("max_slice_nums", MAX_SLICES) if c.processor.get("slice_mode", True) else 1
    layer, n_layers = c.values.get("insert_layer_id", 6), c.vision["num_hidden_layers"]
    if _merge(c) == 4 and not 0 <= layer < n_layers:
        raise ModelError(f"config.json has insert_layer_id = {layer}, but the encoder has {n_layers} layers")
    require_same(c, patch_size=c.vision["patch_size"], downsample_mode=c.values.get("downsample_mode", "16x"))
    return {
        "projector_type": "minicpmv4_6",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.get("layer_norm_eps", 1e-6),
        "vision.image_size": c.processor.get("scale_resolution", 448),
        "vision.projector.scale_factor": _merge(c),
        "vision.wa_layer_indexes": [layer],
        "vision.preproc_max_tiles": None if slices == MAX_SLICES else slices,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    return {} if ".vit_merger." in name and _merge(c) == 2 else array


class MiniCPMV(VisionModel):
    marker = "<|image_pad|>"
    numbered = "<image_id>{}</image_id>"
    #: Strings before all slices, before each slice, after each slice, and after all slices.
    slice_marks = "", "<slice>", "</slice>", ""

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 4)
        if self.merge not in (2, 4):
            raise ModelError(f"clip.vision.projector.scale_factor is {self.merge}, but 2 or 4 patches are merged")
        self.most = self.number("preproc_max_tiles", MAX_SLICES)
        self.check_tiles(self.most + 1, self.image_size)
        layers = self.meta.find("vision.wa_layer_indexes") or [6]
        if not isinstance(layers, list | tuple) or type(layers[0]) is not int or layers[0] < 0:
            raise ModelError("clip.vision.wa_layer_indexes must be the number of a layer: the file is broken")
        self.n_first = self.n_layers if self.merge == 2 else min(layers[0] + 1, self.n_layers)

    def record(self) -> None:
        n = self.weights.n_rows("v.position_embd.weight")
        self.position_table = self.table("v.position_embd.weight", n, self.n_embd)
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True), numbers=range(self.n_first))
        if self.merge == 2:
            self._tokens(x)
            return
        self._window(x)
        first, self.graph = self.graph, Graph(rounds_floats=True)
        x = self.graph.add(Input(Tensor(Rows.TOKENS, self.n_embd), 0, self.n_embd))
        self._tokens(self.layers(x, numbers=range(self.n_first, self.n_layers)))
        self.behind, self.graph = EncoderStage(self.graph, 4), first

    def _window(self, x: Tensor) -> None:
        """Record attention within groups of four patches, and merge each group: its mean plus an MLP's output."""
        at = self.at(self.weights.under("v.vit_merger."))
        self.graph.layer = self.n_first
        cache = self.graph.kv_cache(self.n_heads, self.head_dim)
        self.windowed = (self.n_first,)
        x = self.attention(at, self.norm(at, "ln1", x), cache, None, residual=x)
        self.windowed, self.graph.layer = (), "output"
        mean = at.add(Outputs(x, 4, is_mean=True))
        y = self.vector_norm(at.add(Outputs(x, 4)), "v.vit_merger.ds_ln", self.eps)
        n = at.weights.n_rows("ds_ffn_up.weight")
        y = at.add(Activation(at.linear(y, "ds_ffn_up", n), "gelu"))
        at.add(Add(at.linear(y, "ds_ffn_down", self.n_embd), mean))

    def _tokens(self, x: Tensor) -> None:
        x = self.graph.add(Outputs(self.vector_norm(x, "v.post_ln", self.eps), 4))
        self.two_linears(self.vector_norm(x, "mm.input_norm", 1e-6), "mm.up", "mm.down")

    @property
    def n_joined(self) -> int:
        return 4

    def rows(self, frame: Any) -> FrameRows:
        """Return the patches grouped by token, and within a token by window."""
        rows = super().rows(frame)
        if self.merge != 4:
            return rows
        n = len(rows.inputs)
        order = (np.arange(0, n, 16)[:, None] + block_order(4, 4, 2)).ravel()
        starts = np.arange(n) // 4 * 4
        spans = np.stack([starts, starts + 4]).astype(np.int32)
        return FrameRows(rows.inputs[order], rows.axes[:, order], np.arange(0, n, 4, dtype=np.int32), spans)

    def positions(self, rows: int, columns: int) -> Pixels:
        """Return the nearest position embeddings of the table.

        Source: transformers' ``get_vision_nearest_position_ids``.
        """
        side = math.isqrt(len(self.position_table))
        bounds = ((1 + np.arange(side - 1)) * (1 / side)).astype(np.float32)
        down, across = (self.places(n, bounds) for n in (rows, columns))
        embeddings: Pixels = self.position_table[(down[:, None] * side + across).ravel()]
        return embeddings

    def places(self, n: int, bounds: Pixels) -> Array:
        """Return the table indices of a grid's n rows or columns.  ``bounds``: first fraction of each table row."""
        return np.searchsorted(bounds, np.arange(n, dtype=np.float32) / np.float32(n), side="right")

    def n_rows(self, height: int, width: int) -> int:
        """Return the number of tokens of an image or slice of this size."""
        return height * width // (self.patch_size * self.merge) ** 2

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        side, slices, size = self.patch_size * self.merge, self.most, self.image_size
        while True:
            grid, sizes = self.layout(image, slices, size)
            n_tokens = self.n_rows(*sizes[0]) + (0 if grid is None else math.prod(grid) * self.n_rows(*sizes[1]))
            if max_tokens is None or n_tokens <= max_tokens or (slices <= 1 and size < 2 * side):
                break
            slices, size = (slices - 1, size) if slices > 1 else (1, size - side)
        if max_tokens is not None and n_tokens > max_tokens:  # an elongated image
            sizes = [(side, side)]
        return self.sliced(image, grid, sizes)

    def layout(self, image: Any, slices: int, size: int) -> tuple[tuple[int, int] | None, list[tuple[int, int]]]:
        """Return rows and columns of at most ``slices`` slices, and the sizes of the complete image and a slice."""
        grid = self._grid(image, slices, size)
        sizes = [self._size(image.height, image.width, size, grows=grid is None)]
        if grid is not None:
            tall, wide = max(round(image.height / grid[0]), 1), max(round(image.width / grid[1]), 1)
            sizes.append(self._size(tall, wide, size))
        return grid, sizes

    def sliced(self, image: Any, grid: tuple[int, int] | None, sizes: list[tuple[int, int]]) -> Prepared:
        """Prepare an image and its slices with the grid and sizes of a `layout`."""
        side = self.patch_size * self.merge
        overview = np.asarray(resized(image, *sizes[0], "bicubic"))
        segments: list[str | int] = ["<image>", self.n_rows(*sizes[0]), "</image>"]
        shape = overview.shape[0] // side, overview.shape[1] // side
        if grid is None:
            return Prepared((overview,), tuple(segments), shape)
        rows, columns = grid
        height, width = sizes[1]
        pixels = np.asarray(resized(image, height * rows, width * columns, "bicubic"))
        before, begin, end, behind = self.slice_marks
        segments.append(before)
        for number in range(rows * columns):
            segments += ["\n" if number and not number % columns else "", begin, self.n_rows(height, width), end]
        return Prepared((overview, *cut(pixels, height, width)), (*segments, behind), shape)

    def _grid(self, image: Any, slices: int, size: int) -> tuple[int, int] | None:
        """Return rows and columns of slices, in about the image's aspect ratio, or None for a small image."""
        n = min(math.ceil(image.width * image.height / size**2), slices)
        if n <= 1:
            return None
        best, least, log_ratio = (1, 1), math.inf, math.log(image.width / image.height)
        for count in (n - 1, n, n + 1):
            if count == 1 or count > slices:
                continue
            for rows in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
                away = abs(log_ratio - math.log(count // rows / rows))
                if away < least or (away == least and rows > best[0]):
                    best, least = (rows, count // rows), away
        return best

    def _size(self, height: int, width: int, size: int, *, grows: bool = True) -> tuple[int, int]:
        """Return the height and width of a resized image or slice."""
        if height * width > size**2 or grows:
            ratio = width / height
            height = int(size / math.sqrt(ratio))
            width = int(height * ratio)
        side = self.patch_size * self.merge
        return max(round(height / side) * side, side), max(round(width / side) * side, side)
